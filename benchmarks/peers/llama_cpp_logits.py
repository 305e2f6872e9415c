"""llama.cpp's log-probabilities of texts in ids: `python llama_cpp_logits.py FILE < texts.json`.

Prints, of every token but each text's first, its log-probability and the token that was the most
likely there. Runs in an environment with cyllama, which carries llama.cpp in a wheel.
"""

import json
import sys

import numpy as np
from cyllama.llama import llama_cpp


class Model(llama_cpp.LlamaModel):
    """With what cyllama 0.2.18 asks of it in `get_logits_ith`."""

    @property
    def n_vocab(self) -> int:
        return self.get_vocab().n_vocab


llama_cpp.disable_logging()
llama_cpp.ggml_backend_load_all()
texts = json.load(sys.stdin)
model = Model(sys.argv[1], llama_cpp.LlamaModelParams())
params = llama_cpp.LlamaContextParams()
params.n_ctx = params.n_batch = params.n_ubatch = max(map(len, texts))
params.n_threads = params.n_threads_batch = 1  # Two spin against each other where cores are shared.
context = llama_cpp.LlamaContext(model, params)
chosen, best = [], []
for text in texts:
    context.kv_cache_clear()
    batch = llama_cpp.LlamaBatch(n_tokens=len(text), embd=0, n_seq_max=1)
    for place, token in enumerate(text):
        batch.add(token, place, [0], True)
    context.decode(batch)
    for place, token in enumerate(text[1:]):
        logits = np.array(context.get_logits_ith(place), np.float64)
        highest = logits.max()
        chosen.append(logits[token] - highest - np.log(np.exp(logits - highest).sum()))
        best.append(int(logits.argmax()))
print(json.dumps({"chosen": chosen, "best": best}))
