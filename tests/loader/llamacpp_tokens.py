"""Greedy answers of llama.cpp: a line [file, prompt, number of tokens] in, one of JSON out.

Runs in an environment with xllamacpp, which carries llama.cpp in a wheel.
"""

import json
import sys

import xllamacpp

for line in sys.stdin:
    path, prompt, count = json.loads(line)
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx, params.cpuparams.n_threads = 1, 512, 1
    params.warmup, params.port = False, 0
    asked = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "n_probs": 1}
    try:
        server = xllamacpp.Server(params)
        answer = server.handle_completions({**asked, "cache_prompt": False, "ignore_eos": True})
        found = answer["choices"][0]["logprobs"]["content"]
        print(json.dumps([[one["id"], one["logprob"]] for one in found]), flush=True)
    except RuntimeError as error:
        print(json.dumps(str(error)), flush=True)
