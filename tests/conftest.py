"""How much hypothesis does. HYPOTHESIS_PROFILE picks the profile; under "ci", TRIO_MORI_EXAMPLES says how many
examples a property is tried with. No deadline in either: the machine may be busy.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("default", max_examples=100, deadline=None)
settings.register_profile(
    "ci", max_examples=int(os.environ.get("TRIO_MORI_EXAMPLES", "1000")), deadline=None, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
