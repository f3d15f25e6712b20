"""Stage-to-stage transfer measured: trio_mori beside what else there is, in turns, in one run. See docs/performance.md.

`cases` says what is measured, `peers` who is, `halves` how each of them is driven; `measure` runs it and writes JSON,
of which `figures`, `page` and `publish` make what people read.
"""
