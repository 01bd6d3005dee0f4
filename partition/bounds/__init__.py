"""How good any plan could be: proofs that no plan of a space is faster. They change no plan.

best_bound chooses among them. The fractional bound, a small linear programme, speaks about all plans; where
hosts lend memory it is host_bound, in which optimizer states pass the hosts' links. Where states, gradients
or weights are sharded, sharded_bound counts them nowhere. The pipeline bound speaks
about pipelines that share no device: by whole numbers of devices where these allow it
(`exact.cluster_split`), on classes that merged_classes made fewer, else by column_bound, Farley's bound over
all columns. That one asks pricing_bound, a dynamic programme, for the least price of a pipeline, on stages
whose costs relaxed_stages bounds from below, for the amount_intervals that it is asked about. With sums of
gradients between nodes (`sync_bound_s`) the pipeline bound is asked twice, with the sums of sync_tables and
with few pipelines, beside the closed forms of card_bound. Then come what nodes can do (node_bound, from what
runs of layers do, node_samples, and are worth, node_values), and whole pipelines with the cards that they
pass (card_columns, by pipeline_amounts, with the rows of card_rows): the price of a pipeline, from run_kernel
on the arrays of run_tables, is found without ranges of paths, so that it serves large clusters without sums,
too, before column_bound. Plans with a layer on one node only are asked for in home_parts, and what is on that
node with all layers in whole_pipelines. card_columns_bound goes on with the case of plans of which least is
known.

For others:
    best_bound: best_bound, offloaded_bound, fractional_bound_s, bound_space, Bound
    sharded_bound: sharded_bound, sharded_pipeline_bound
"""
