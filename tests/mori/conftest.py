"""The emulated GPUs, where they are there: torch takes `cuda:N` for their memory."""

import mori_lane

if mori_lane.moriemu is not None:
    mori_lane.moriemu.install()
