"""Large clusters: a linear programme whose columns are pipelines on classes of devices.

master_problem chooses how many pipelines of each column to run; pricing_problem finds new columns at its dual
prices; column_generation alternates between the two until the step stays; rounding makes whole pipelines of
the answer. pipeline_pool does the same with columns that a local search has timed, to recombine them
(Gilmore and Gomory, Operations Research 1961; Rochat and Taillard, Journal of Heuristics 1995).

For others:
    column_generation: generate, Columns, ColumnPool, search_cuts, ROUNDS; rounding: rounded
    pipeline_pool: PipelinePool; master_problem: MasterProgramme, solve_master, MasterProblem
"""
