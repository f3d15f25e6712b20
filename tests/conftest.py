"""How much hypothesis does. HYPOTHESIS_PROFILE picks the profile; under "ci", TRIO_MORI_EXAMPLES says how many
examples a property is tried with. No deadline in either: the machine may be busy.

And torch gets one thread: with two, a copy takes 8 ms instead of 0.2 whenever something else is running.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, which is later

settings.register_profile("default", max_examples=100, deadline=None)
settings.register_profile(
    "ci", max_examples=int(os.environ.get("TRIO_MORI_EXAMPLES", "1000")), deadline=None, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
