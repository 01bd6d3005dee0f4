"""The data of a run and the task made of them: samples as a function of their position in training.

Every rank reads the samples that it needs, so that no batch travels and no plan changes what is trained on.
A `TrainingTask` joins a chain of layers, batches and a loss; for models by name the texts are split with a
vocabulary (`vocabulary`, `special_tokens`) and ordered by `dataset`, chats (`json_lines`) written by
`chat_template` and ordered by `chats`; a user's own model and data come in through `user_task`, `own_code`
knows what its times depend on.

Others use:
    task: TrainingTask, TaskFactory, OptimizerFactory, prepare_data, registered_task, model_notes
    user_task: own_task, UserTask, Model
    vocabulary: read_corpus
    chat_template: read_template, write_for_transformers
"""
