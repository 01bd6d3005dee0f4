"""The plan spaces of known systems, as they are published, to compare `auto` with.

strategy: what one is, and why it may have no plan; catalogue: all by name. layer_splits: one device, and cuts
of one pipeline (GPipe, torchgpipe, Whale). whole_models: what holds the whole model on every device, with
shares of the batch: data_parallel (DDP, ours in Poplar's space), largest_microbatch of each device, with it
poplar_rules and poplar_steps (as the paper has them), cephalo, flops_shares (Whale, HAP). drafts: pipelines
that share devices: pipedream, heterog. virtual_workers: HetPipe; bandwidth_groups: HexiScale, Zorse. Each
strategy is a function of the problem and the evaluator that gives a plan, or says in one line why it has
none.

For others:
    catalogue: BASELINES, WELL_KNOWN, PUBLISHED; strategy: Strategy, TooManyDevicesError;
    layer_splits: gpipe_even; largest_microbatch: largest_microbatches
"""
