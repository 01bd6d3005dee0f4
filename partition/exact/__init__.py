"""Dynamic programmes: exact for single pipelines and small clusters, and bounds of what a cluster can do.

`cut_dp` cuts a pipeline on given devices, `chain_search` tries all orders of a few devices, `cluster_split`
parts a small cluster into pipelines and bounds what any parting does, `feasibility` finds a pipeline that
memory takes or says what is missing. Others import these four, and `compiled` for loops of their own.
"""
