"""From a good set of pipelines to a better one: moves of layers, devices and samples.

moves changes one thing at a time as long as that helps; threshold_accepting also accepts a little worse,
to get away from where moves end; placement puts pipelines of classes on named devices; starts makes the
sets to begin with, column_search makes pipelines worth more than their devices, and pipeline_search is
the whole way from starts to the best set, with the columns and dynamic programmes of earlier chapters;
searched_plans gives what it finds as plans, tuned_plans changes in the end what the simulator judges;
alike_sets says of which sets one is simulated for all. Where sums or queues take much of a step, families
of pipelines that are all alike are searched too: families says which there are, family_cuts cuts and
estimates them, family_sums says how long their sums are seen, family_floors which need no cuts,
family_alignment puts cuts of two at the same layers, family_starts says which come first, family_moves
changes all copies at once, family_walk walks by estimates, and family_search is the whole way.

For others:
    pipeline_search: PipelineSearch; moves: LocalSearch, PipelineSet, fitted
    searched_plans: plans_of, plans_of_sets, improved_starts, each_once, with_sync, with_as_many
    family_search: best_families, families_may_win, sync_share
    tuned_plans: tuned
"""
