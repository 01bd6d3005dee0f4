"""Who holds what: plans, the search for them, and bounds on how good they can be. No torch here.

A `Problem` (problem) asks: a profile, a cluster, a batch. A `Plan` (plan, read and written by plan_file)
answers. `solve` (solver) leads from one to the other for every strategy and adds figures and a bound;
`auto` (auto) is the strategy that searches. Plans are judged by a callback, `Evaluate`: the simulator, which
is a later package. Chapters, each with an own page like this one, from the first to the last: estimates,
column_generation, constraints, exact, baselines, shared_devices, local_search, bounds, explanation.

For others:
    problem: Problem, Forced, Evaluate, check_plan, problem_of, problem_of_plan
    plan: Plan, Pipeline, Stage, Figures, DeviceFigures; plan_file: read_plan, plan_text
    solver: solve, compare, Outcome, with_figures; auto: STRATEGIES
"""
