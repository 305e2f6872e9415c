#!/bin/sh
# llama-3.1-8b in bfloat16: H100: 2
# planned for 40 requests/s, 1,024 tokens in, 256 out, p99 TTFT < 1 s, TPOT < 50 ms
# Names of the options: tensorrt-llm commit 00209af149e7, tensorrt_llm/commands/serve.py.
test -n "$MODEL" || MODEL=llama-3.1-8b  # A folder or a hub id.
CUDA_VISIBLE_DEVICES=0 trtllm-serve serve "$MODEL" --tp_size 1 --max_batch_size 277 --max_num_tokens 512 --enable_chunked_prefill --max_seq_len 2560 --port 8000 &
CUDA_VISIBLE_DEVICES=1 trtllm-serve serve "$MODEL" --tp_size 1 --max_batch_size 277 --max_num_tokens 512 --enable_chunked_prefill --max_seq_len 2560 --port 8001 &
# One address before them (other nodes: their names):
headrace route http://127.0.0.1:8000 http://127.0.0.1:8001 &
wait
