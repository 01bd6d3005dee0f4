"""What a candidate takes, without simulating it: seconds, bytes and in_flight of stages and pipelines.

Two families. Tables by class of devices (device_classes, stage_tables) price every stage of every class at
once, for dynamic and linear programmes, for the amounts of samples that a pipeline passes. Pipelines on named
devices are timed one by one: closed_forms and pipeline_clock for one number of microbatches (compiled_clock
where there are very many, as clocks says), extended_clock for any, timed_pipeline for samples; stage_needs
says what memory takes of a stage, pipeline_costs adds the links; gradient_sync, sync_tail and network_cards
add what they do to one another, step_estimate is of whole plans, devices shared or not. shared_pipelines
finds in_flight where they are, batch_split shares out the samples, optimizer_sharding the optimizer states,
group_sharding says how much of a group is sharded, ranking compares plans, plan_memory counts their bytes,
host_moves times what hosts keep, and host_fetches what GPUs get through them; weight_gathers bounds steps
that gather weights. effort is the one table of how much work the planner spends at which size, family_effort
its part for families. No search here: every other chapter of `partition` builds on this one.

For others:
    clocks: Clocks; compiled: compiled
    arrays: Floats, Singles, Integers, Places, Bools
    effort: effort_for, LARGE, ColumnEffort, SimulatorEffort, Sweeps, Walks
    family_effort: FamilyEffort, FamilyWalk
    device_classes: DeviceClasses, ClassOrder, equal_devices
    amounts: Amount; layer_bytes: LayerBytes, between
    stage_tables: ProblemTables, SizeTables, working_table, FAR_S
    class_pipeline: ClassPipeline, ColumnStage
    closed_forms: cap_in_flight, TOLERANCE
    timed_pipeline: TimedPipeline, PipelineTiming, TimedStage, TimingCache, timed_stages
    step_estimate: StepEstimate
    pipeline_costs: PipelineCosts, Layout, missing_error
    shared_pipelines: SharedPipeline, SharedPipelineCosts, Draft
    gradient_sync: SyncCosts; sync_tail: Tail, Copies; batch_split: share_out
    network_cards: CardLoad, queued_s, FEW_HOPS
    plan_memory: memory_on, plan_memory, stepped_bytes
    host_moves: plan_step_s, weight_moves_s, saved_moves_s, moves_added_s, stage_visits
    host_fetches: host_fetches, HostFetches, pinned_bytes, served_s, taken_s
    optimizer_sharding: fits, with_state_owners, unsharded
    group_sharding: sharded_plans, roomier_plans, least_sharded
    weight_gathers: gathers_s
    ranking: Ranking, Contest, by_estimate, best_plan, rank, variants
"""
