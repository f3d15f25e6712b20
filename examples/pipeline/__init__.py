"""A three-stage pipeline in three processes: a recording goes in, hidden states and codec frames go from stage to
stage through `trio_mori`, the decoded sound comes out. Start with `models.py` (what the stages compute), then
`stages.py` (what a stage process does with the connector), then `__main__.py` (who starts and watches them).
"""
