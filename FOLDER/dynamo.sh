#!/bin/sh
# llama-3.1-8b in bfloat16: H100: 2
# planned for 40 requests/s, 1,024 tokens in, 256 out, p99 TTFT < 1 s, TPOT < 50 ms
# Names of the options: dynamo 1.6.1, the wheel's dynamo/vllm/backend_args.py, dynamo/common/configuration; it takes vLLM's as well.
test -n "$MODEL" || MODEL=llama-3.1-8b  # A folder or a hub id.
python -m dynamo.frontend --http-port 8000 --router-mode kv &
CUDA_VISIBLE_DEVICES=0 python -m dynamo.vllm --model "$MODEL" --tensor-parallel-size 1 --max-num-seqs 277 --max-num-batched-tokens 512 --max-model-len 2560 &
CUDA_VISIBLE_DEVICES=1 python -m dynamo.vllm --model "$MODEL" --tensor-parallel-size 1 --max-num-seqs 277 --max-num-batched-tokens 512 --max-model-len 2560 &
wait
