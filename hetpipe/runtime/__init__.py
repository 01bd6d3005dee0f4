"""The execution of a program on real or emulated devices, which measures its trace.

`processes` starts a rank per device with its `rank_threads`, as forks of a `rank_server` (which, ahead of
them, `ends_with_parent`), `stopping` hears signals, `scratch` is for what is gone then;
`rank_setup` gives a rank its layers and an `Executor`, which runs the instruction list and leaves each
resource to its owner: `stage_runner` the computations, `transport` the messages, `gradient_sync` the sums
(`inner_sums`: those that begin inside a backward), `layer_sync` those of a step that goes layer by layer,
with what is fetched (`held_weights`), `optimizer` the step, a `Pace` the clock. `bucket_parameters` says
which parameters, and parts of them, are whose.
`host_states`, `host_weights` and `host_activations` bring what the host keeps, `host_steps` lets it step.
`emulated_links`, `pace` and `byte_counter` make CPUs behave as the devices and links of a cluster file.

Others use:
    processes: run_ranks, RankGroup, Emit, WorkerLostError, under_torchrun
    rank_server: server_ahead
    stopping: Stopping, signals_heard
    scratch: scratch_folder
    rank_setup: RankLayers, executor_of, boundaries_of, slices, pace_of, torch_device
    executor: Executor
    step_outcome: StepOutcome
    heartbeats: within_step, waits, goes_on
    rank_watch: Watch
    remote_store: StoreServer, RemoteStore
    stage_runner: StageRunner, Microbatch
    transport: DistributedTransport, TensorShape
    message_times: MessageTimes
    gradient_sync: GradientSync
    bucket_parameters: Part, counted_names, owned_parts, parts_in
    optimizer: Optimizer, OPTIMIZER_STATES
    loss_scale: LossScale
    named_optimizers: factory_of
    torch_optimizer: TorchOptimizer, optimizer_of, make_checked, optimizer_name
    peer_errors: PeerError, peer_error
    rank_threads: threads_for, rank_threads
    gpus: gpus_here, free_memory_here, check_here
    accelerators: memory_figures, MemoryFigures
    host_staging: Staging, room_on_host
    pace: Pace, EmulatedPace, sleep_until
    cuda_events: GpuPace
    emulated_links: Board
    byte_counter: ByteCounter, counter_on
    host_load: HostLoad
    slowed_module: SlowedModule, VirtualPace
    torchgpipe_backend: to_torchgpipe
"""
