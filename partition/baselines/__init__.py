"""The plan spaces of known systems, planned as these would: what `auto` is never worse than.

`layer_splits.BASELINES` names them all; `data_parallel` and `pipedream` hold those that replicate.
"""
