"""Fuzzing of everything that decodes what a peer, or a file, says; `python -m tests.fuzz --list` names the targets."""
