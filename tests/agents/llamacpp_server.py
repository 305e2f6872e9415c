"""llama.cpp's server over a file, until it is ended: `python llamacpp_server.py FILE`.

Prints its address. Runs in an environment with xllamacpp, which carries that server in a wheel.
"""

import sys
import time

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_parallel = 2
params.n_ctx = 8192
params.cpuparams.n_threads = 1  # Two spin against each other where cores are shared.
params.use_jinja = True
params.port = 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
while True:
    time.sleep(3600)
