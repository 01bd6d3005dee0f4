"""What things cost: hardware, models, and the seconds and bytes that one takes on the other. No torch here.

A `Cluster` (cluster, read by cluster_file) says which devices there are and how they are linked; a
`ModelProfile` (profile) what every layer of a model costs on every kind of device, measured or estimated from
the catalogue (roofline). The only code that turns them into seconds and bytes: layer_costs (a stage),
memory (a device), network (messages and gradient sync). All other packages build on this one.

For others:
    cluster: Cluster, Node, Device, Link; cluster_file: read_cluster
    profile: ModelProfile, KindProfile, LayerProfile, read_profile
    layer_costs: Prices; memory: StageShape, DeviceMemory, device_memory, trained_bytes, working_bytes,
        segments, segment_choices, segment_bytes, leanest_segments
    network: Network, all_reduce_s, reserve and its kin; collectives: Collective;
        collective_choice: cheaper_collective; ring_estimates: all_reduce_estimate_s, sum_estimate_s
    measured_links: MeasuredLink, MeasuredAllReduce
    catalogue: accelerator; roofline: estimate_kind, nearest_kind; known_errors: distrust, far_off
    dtypes: parse_dtype, check_fast, check_estimable
    what_if: changed; other_clusters: without; expenses: expenses, Expenses, Objective
    errors: InputError, InfeasibleError, CheckFailedError, DivergedError; units: format_bytes, format_seconds
    strict_files: read_json, validate, did_you_mean, write_atomically
"""
