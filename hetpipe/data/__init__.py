"""The data of a run and the task made of them: samples as a function of their position in training.

Every rank reads the samples that it needs, so that no batch travels and no plan changes what is trained on.
A `TrainingTask` joins a chain of layers, batches and a loss. What files hold for a model by name is one
of the kinds that `kinds` lists; each has one home with the protocol of `kind`: it reads files, writes
them into the run folder, and gives samples from there. `texts` and `dataset` are plain text,
`chat_lines`, `chat_template` and `chats` are chats; both are split with a vocabulary (`vocabulary`,
`special_tokens`), and `packed_samples` puts several of either into a row; `length_groups` have what is filled
up, like beside like. `long_texts` and long `file_rows` are read in pieces, of files whose `file_states` are
the same each time; tokens of texts are `kept_tokens` of the cache, and `listened` tells how far that is.
`token_files` stay where they are, and `table_files` hold rows as JSON lines do. `pair_files` and `pairs` are
translations, which `bleu` compares; `questions` have their `answers` in a text. A user's own model and data
come in through `user_task`, `own_code` knows what its times depend on, and `main_module` what code sees of
its script.

Others use:
    task: TrainingTask, TaskFactory, OptimizerFactory, prepare_data, registered_task, model_notes
    user_task: own_task, UserTask, Model
    kinds: read_data, written_sha256
    texts: read_corpus
    listened: listening
    chat_template: read_template, write_for_transformers
    bleu: References, bleu_of
"""
