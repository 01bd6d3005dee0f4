import pytest
from safetensors.torch import load_file

import user_tasks
from cost_model.cluster import CPU
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.training.run import train
from runs import chain_plan, cluster_file


def made_up(num_layers: int) -> ModelProfile:
    layers = tuple(LayerProfile(f"{index}", 1000.0, 64.0, 64.0) for index in range(num_layers))
    times = LayerTimes((0.001,), (0.002,))
    return ModelProfile(
        "mine", 1, "float32", layers, {CPU: KindProfile("measured", (1,), (times,) * num_layers)}
    )


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_rank_changes_no_parameter_on_any(tmp_path):
    settings = Settings("mine", 3, learning_rate=1e-2, sequence_length=1, every=1)
    folder = RunFolder(tmp_path / "run")
    # the inputs of step 2 make the gradient of layer 0 infinite, which rank 0 holds; all others are finite
    plan = chain_plan("mine", [0, 1, 2, 3], 4)
    train(settings, cluster_file(tmp_path), made_up(3), plan, folder, make_task=user_tasks.spiky_task)
    assert [entry["finite"] for entry in folder.read_metrics()] == [True, False, True]
    assert [entry["step"] for entry in folder.read_metrics()] == [1, 2, 3]

    def tensors(step: int) -> dict[str, object]:
        found = {}
        for layer in range(3):
            path = folder.checkpoints / f"step-{step:06d}" / f"layer-{layer:03d}.safetensors"
            found |= {key: value.tolist() for key, value in load_file(path).items()}
        return found

    first, second, third = tensors(1), tensors(2), tensors(3)
    assert second == first
    assert all(third[key] != first[key] for key in first)
