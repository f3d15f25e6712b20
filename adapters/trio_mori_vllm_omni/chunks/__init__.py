"""vllm-omni's chunk adapter on nurseries: it moves chunks between a stage's scheduler and its connector.

Two halves with one owner each. The *scheduler's half* (`_reading`, `_writing`, `_parking`, `_prompt` and what they
stand on) decides; it is synchronous, knows neither trio nor vllm-omni, and only ever runs in the scheduler's thread.
The *loop's half* (`_receiving`, `_sending`, `_bench`) waits, in tasks. Between them are two queues (`_courier`), no
lock and no shared state. See docs/vllm-omni.md.
"""

from __future__ import annotations
