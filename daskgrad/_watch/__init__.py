"""Seen while it runs: progress, and the gradient page on Dask's dashboard.

_reporter.py   one part, written by the thread that computes it; and how its numbers get to whoever watches
_tally.py      the numbers of all parts, added up by computation; also runs on the scheduler
_progress.py   dg.progress(): the tally of this process, in a terminal, a notebook or as plain lines
_cluster.py    a plugin of a scheduler, which tallies what workers tell; who holds it
_monitor.py    dg.monitor(): the page, and its numbers in a notebook
_notes.py      what is seen of one part's results     _history.py  of each computation, over time
_page.py       the page in Bokeh                      _tables.py   its numbers as HTML
"""
