"""The way from a plan to the instruction list of every rank.

A plan says who holds what; a program says what each rank does in which order: computations, messages, sums,
norm, optimizer step. `lowering` makes it out of an order of computations (`schedules`, `list_scheduling`,
joined in `compute_orders`) and the buckets of gradients; `verification` proves that it cannot deadlock and
computes what the plan says; `costs` prices its instructions; a `Trace` tells when they ran. The simulator
and the executor read the same program. No torch here.

Others use:
    instructions: Program, Schedule, Instruction, Compute, Transfer, Sync, Norm, Step, Broadcast, Bucket,
        Reduce, Gather, Round, Exchange, Pass, Direction, Message, incoming, outgoing
    program_text: parse_instruction, parse_program
    layer_rounds: awaited_rounds, dropped_weights, buckets_by_layer, is_fetched, visit_fetches
    lowering: lower_as
    gradient_buckets: gradient_buckets, with_collectives
    sync_starts: inner_syncs, after_layer_s, layers_reached
    collective_parts: Group, Operation, Part, sum_parts, broadcast_part
    schedules: one_f_one_b
    verification: verify
    costs: ProgramCosts, check_memory
    trace: Trace, Event, chrome_trace
"""
