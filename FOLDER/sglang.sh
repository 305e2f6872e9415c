#!/bin/sh
# llama-3.1-8b in bfloat16: H100: 2
# planned for 40 requests/s, 1,024 tokens in, 256 out, p99 TTFT < 1 s, TPOT < 50 ms
# Names of the options: sglang 0.5.23, the wheel's sglang/srt/arg_groups/fields.
test -n "$MODEL" || MODEL=llama-3.1-8b  # A folder or a hub id.
CUDA_VISIBLE_DEVICES=0 python -m sglang.launch_server --model-path "$MODEL" --tp-size 1 --max-running-requests 277 --chunked-prefill-size 512 --context-length 2560 --port 8000 &
CUDA_VISIBLE_DEVICES=1 python -m sglang.launch_server --model-path "$MODEL" --tp-size 1 --max-running-requests 277 --chunked-prefill-size 512 --context-length 2560 --port 8001 &
# One address before them (other nodes: their names):
headrace route http://127.0.0.1:8000 http://127.0.0.1:8001 &
wait
