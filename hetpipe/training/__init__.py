"""Training itself: steps, checkpoints, and the ways to start them.

`run` checks and starts a run, in processes of this host or under `torchrun`, and hands the ranks what was
predicted (`handover`); what it goes on from is `resumption`'s, and `recovery` starts it again when a
rank is lost. `rank` is the life of one rank, and `meeting` what ranks say to each other between
steps; `evaluation` tells of held-out samples, `translations` writes those that BLEU is of. A `checkpoint`
is a file per layer, complete or absent, written by the layers' owners (`checkpoint_owners`; `joined_parts`
brings ranges of a layer together) and read under any plan; of a model with adapters it holds these alone,
and hashes of the base (`frozen_base`). `checkpoint_damage` finds the newest whole one, `checkpoint_weights`
fills a model from one, `adapter_export` takes adapters out. `trainer` is for a user's own model, which
`own_planning` measures and plans for, and tells `callbacks`; `user_loop` is for a user's own loop.

Others use:
    run: train, train_predicted, verified_prediction, measure
    resumption: find_checkpoint
    recovery: Replan
    trainer: Trainer, AdamW
    callbacks: Callback
    user_loop: RankStages, execute, trace_of
    checkpoint: latest, read_manifest, Manifest
    checkpoint_weights: load_weights, export_huggingface
    checkpoint_owners: check_adapters
    checkpoint_room: room_of
    adapter_export: export_adapter, export_merged
    meeting: gather, LEAD_S
    torchrun: follow
"""
