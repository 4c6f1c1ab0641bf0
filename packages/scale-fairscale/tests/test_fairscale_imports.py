"""Every path by which programs import something of FairScale's data-parallel half."""

import importlib
import warnings
from importlib import metadata
from typing import Any

import pytest

import fairscale
from fairscale import _warnings
from fairscale._warnings import FairScaleWarning, Refused, warn_argument

PATHS = {
    "fairscale.nn": "checkpoint_wrapper FullyShardedDataParallel ShardedDataParallel MOELayer Top2Gate "
    "FlattenParamsWrapper auto_wrap config_auto_wrap_policy default_auto_wrap_policy enable_wrap wrap",
    "fairscale.nn.data_parallel": "FullyShardedDataParallel TrainingState auto_wrap_bn get_fsdp_instances "
    "no_pre_load_state_dict_hook ShardedDataParallel",
    "fairscale.nn.data_parallel.fully_sharded_data_parallel": "FullyShardedDataParallel TrainingState",
    "fairscale.nn.data_parallel.sharded_ddp": "ShardedDataParallel",
    "fairscale.nn.data_parallel.fsdp_optim_utils": "is_singleton_tensor",
    "fairscale.nn.wrap": "auto_wrap config_auto_wrap_policy default_auto_wrap_policy enable_wrap wrap",
    "fairscale.nn.wrap.auto_wrap": "ConfigAutoWrap",
    "fairscale.nn.misc": "FlattenParamsWrapper GradBucket ParamBucket checkpoint_wrapper",
    "fairscale.nn.misc.checkpoint_activations": "checkpoint_wrapper",
    "fairscale.nn.misc.flatten_params_wrapper": "FlatParameter ParamGroups FlattenParamsWrapper",
    "fairscale.nn.checkpoint": "checkpoint_wrapper is_checkpointing is_recomputing",
    "fairscale.nn.checkpoint.checkpoint_activations": "disable_checkpointing enable_checkpointing enable_recomputing",
    "fairscale.nn.checkpoint.checkpoint_utils": "patch_batchnorm",
    "fairscale.nn.pipe.checkpoint": "Checkpoint Recompute save_rng_states restore_rng_states",
    "fairscale.utils.containers": "pack_kwargs unpack_kwargs split_non_tensors unpack_non_tensors",
    "fairscale.nn.moe": "MOELayer Top2Gate",
    "fairscale.nn.moe.top2gate": "top2gating",
    "fairscale.optim": "AdaScale AdaScaleWrapper OSS Adam Precision GradScaler",
    "fairscale.optim.utils": "broadcast_object",
    "fairscale.optim.grad_scaler": "GradScaler ShardedGradScaler OptState",
    "fairscale.optim.layerwise_gradient_scaler": "LayerwiseGradientScaler LayerInfo",
    "fairscale.experimental.nn": "MEVO OffloadModel SyncBatchNorm",
    "fairscale.experimental.nn.auto_shard": "shard_model",
    "fairscale.experimental.nn.ampnet_pipe.pipe": "AMPnetPipe",
    "fairscale.experimental.nn.data_parallel": "SlowMoBaseAlgorithm SlowMoDistributedDataParallel",
    "fairscale.experimental.nn.data_parallel.gossip": "SlowMoBaseAlgorithm SlowMoDistributedDataParallel",
    "fairscale.experimental.optim": "DynamicLossScaler",
    "fairscale.experimental.tooling.layer_memory_tracker": "LayerwiseMemoryTracker ProcessGroupTracker "
    "suggest_checkpoint_location find_best_reset_points compare_memory_traces_in_plot",
    "fairscale.experimental.wgit": "Repo SignalSparsity",
    "fairscale.experimental.nn.mevo": "MEVO MemoryEfficientVocabOutput BaselineSoftmaxNllLoss",
    "fairscale.experimental.nn.distributed_pipeline.graph": "PipelineModulesGraph",
    "fairscale.utils.testing": "DummyProcessGroup",
    "fairscale.fair_dev.testing.testing": "DummyProcessGroup dist_init objects_are_equal set_random_seed",
    "fairscale.internal.version": "torch_version",
    "fairscale.internal.containers": "apply_to_tensors pack_kwargs unpack_kwargs split_non_tensors unpack_non_tensors",
    "fairscale.internal.parallel": "chunk_and_pad get_process_group_cached ProcessGroupName validate_process_group",
    "fairscale.internal.params": "calc_grad_norm recursive_copy_to_device",
    "fairscale.internal.state_dict": "find_module_instances replace_by_prefix_",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_fairscale_can_be_imported(path: str) -> None:
    module = importlib.import_module(path)
    missing = [name for name in PATHS[path].split() if not hasattr(module, name)]
    assert missing == []


@pytest.mark.parametrize(
    "older, path",
    [
        ("fairscale.fair_dev.testing", "fairscale.fair_dev.testing.testing"),
        ("fairscale.utils.testing", "fairscale.fair_dev.testing.testing"),
        ("fairscale.nn.misc.checkpoint_activations", "fairscale.nn.checkpoint.checkpoint_activations"),
    ],
)
def test_an_older_path_has_the_names_of_the_newer_one(older: str, path: str) -> None:
    found, expected = importlib.import_module(older), importlib.import_module(path)
    assert found.__all__ == expected.__all__
    assert all(getattr(found, name) is getattr(expected, name) for name in expected.__all__)


@pytest.mark.parametrize(
    "path, name, instead",
    [
        ("fairscale.experimental.nn", "MEVO", "vocab_parallel_cross_entropy"),
        ("fairscale.experimental.nn.ampnet_pipe.pipe", "AMPnetPipe", "DistributedPipe"),
        ("fairscale.experimental.wgit", "Repo", "scale_snapshot"),
    ],
)
def test_what_is_not_offered_is_refused_when_it_is_used(path: str, name: str, instead: str) -> None:
    offered = getattr(importlib.import_module(path), name)
    with pytest.raises(NotImplementedError, match=rf"{name}|MemoryEfficientVocabOutput") as caught:
        offered()
    assert instead in str(caught.value)


def test_versions_compare_as_strings_as_fairseq_does() -> None:
    assert not fairscale.__version__ < "0.4.0"
    assert fairscale.__version__ == ".".join(map(str, fairscale.__version_tuple__))


def test_the_distributions_version_is_known_as_transformers_asks() -> None:
    assert metadata.version("fairscale") == fairscale.__version__
    assert metadata.requires("fairscale") == ["scale-fairscale"]


def test_it_refuses_to_stand_beside_fairscale(monkeypatch: pytest.MonkeyPatch) -> None:
    found = metadata.distributions

    def with_fairscale(**kwargs: Any) -> Any:
        return found(name="torch") if kwargs.get("name") == "fairscale" else found(**kwargs)

    monkeypatch.setattr(metadata, "distributions", with_fairscale)
    with pytest.raises(ImportError, match="pip uninstall fairscale and then reinstall scale-fairscale"):
        importlib.reload(fairscale)


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    _warnings.warn_once.cache_clear()


def test_an_argument_warns_once_and_at_the_callers_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            warn_argument("OSS", "group", "has another name: OSS(params, SGD, process_group=group)")
    (warning,) = caught
    assert warning.category is FairScaleWarning
    assert warning.filename == __file__
    assert str(warning.message) == "OSS(group=): has another name: OSS(params, SGD, process_group=group)"


def test_what_is_not_offered_says_why_and_what_to_use() -> None:
    class Gone(Refused):
        why = "nobody used it"
        instead = "torch.nn.Linear"

    with pytest.raises(NotImplementedError, match=r"^Gone is not offered: nobody used it\. Use torch.nn.Linear$"):
        Gone(1, two=2)
