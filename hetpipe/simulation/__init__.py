"""The prediction of a program's trace, and of the best schedule for a plan.

`simulator` is the definition: it runs the instruction lists against the costs, a device and a link at a time.
`fast_simulator` gives the same times for the planner's many candidates, compiled where that pays.
`schedule_selection` lowers a plan under the schedule that simulates fastest, `collective_selection` does so
with its sums, and `prediction` is what the planner and the commands call. `shared_network` is a second
clock, of messages that share the network (`fair_shares`); `shared_choice` takes the plan that is best by it.
No torch here.

Others use:
    simulator: simulate
    schedule_selection: lower
    prediction: evaluator, predict, simulate_plan
    shared_network: shared_step_s
    shared_choice: least_shared
"""
