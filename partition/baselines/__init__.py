"""The plan spaces of known systems, as they are published, to compare `auto` with.

layer_splits: one device, equal and balanced cuts of one pipeline (GPipe, torchgpipe), and the table of all
baselines; data_parallel: every device holds the whole model, with equal or unequal shares of the batch (DDP,
Poplar); pipedream: replicated stages after Narayanan et al. (SOSP 2019). Each is a function of the problem
and the evaluator that gives a plan, or says in one line why it has none.

For others:
    layer_splits: BASELINES, Strategy, TooManyStagesError, gpipe_even
"""
