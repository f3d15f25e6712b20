"""vllm-omni on trio_mori."""
