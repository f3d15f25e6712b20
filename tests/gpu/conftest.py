"""The connector's own tests are shared with those of Mori."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "mori"))
