"""Small clusters and single pipelines: dynamic programmes that leave nothing out of their space.

cut_dp cuts the layers for devices in a given order, of the stages that cut_places gives; chain_dp and
chain_search do so for all orders of a pipeline on a few devices; count_dp (with count_vectors, count_stages)
for pipelines that are known by how many devices of each class they take; cluster_split and cluster_split_lp
divide the cluster among such pipelines, as plans or as a bound. feasibility and memory_programme say
whether memory takes any pipeline at all. The inner loops are compiled (cut_kernel, suffix_kernel,
split_kernel).

For others:
    cut_dp: CutOptimizer; chain_search: search_chains, AUTO; feasibility: least_pipeline
    cluster_split: ClusterSplit, families, GROWTH, SAFETY
"""
