"""A model as a chain of layers, of which each rank builds its own alone.

A model comes by name, from a Hugging Face folder, or as a module (`names`, `huggingface_folder`,
`families`, `huggingface`). `chain` describes it without weights: `observation` looks at one forward of it, or
of a small copy, `found_structure` says which layers of the `block_structure` hold what, `sequential` reads an
nn.Sequential; `splittable` rewrites what cannot be cut. What a rank owns is materialised as a `LayerModel`,
whose weights do not depend on the plan (`initialization`, `pretrained_weights`), nor does dropout
(`keyed_dropout`); `placement` gives them their device and dtype, `frozen_weights` leaves frozen ones theirs,
and `weight_bytes` counts them. `adapters` are put beside a frozen base, and go in and out of an
`adapter_folder`. `split_check` proves that split equals whole, and with `packed_inputs` that samples of one
row have nothing of each other. `rank_modules` tells what ranks of a model load, of which `dropout_ahead` and
`peft_ahead` are for a server that forks them.

Others use:
    chain: ChainModel
    partial_model: LayerModel
    huggingface: ModelSpec, model_spec, folder_spec
    adapters: task_spec, with_adapters, is_adapter, merged_weights
    adapter_folder: AdapterFolder, write_adapter_folder
    names: Task, ModelEntry, model_entry
    rank_modules: modules_ahead, modules_of, RANKS
    huggingface_folder: described, TOKENIZER_FILE
    pretrained_weights: FolderWeights
    loss: Loss, loss_sum
    keyed_dropout: KeyedDropout, PREFIX
    frozen_weights: is_rounded
    mixed_precision: weight_dtype, lowered_dtype, boundary_dtype, kept_casts
    block_structure: logits_of, refused_on_error
    split_check: check_split
    kept_proofs: require_split
    packed_inputs: check_packs
"""
