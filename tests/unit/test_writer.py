"""``config.toml`` trains the same run again."""

import re

import pytest
import tomli
from torchtitan.components.loss import MSELoss
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import model_registry

from monarch_titan.config.errors import ConfigError
from monarch_titan.config.loader import load
from monarch_titan.config.writer import to_toml

BASE = '[torchtitan]\nmodule = "{}"\nconfig = "{}"\n'


@pytest.fixture
def resolve(tmp_path):
    """Loads a base configuration with overrides."""

    def resolve(module, config, *overrides):
        path = tmp_path / "run.toml"
        path.write_text(BASE.format(module, config))
        return load(path, *overrides)

    return resolve


def reload(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load(path)


def comparable(config):
    """All of a configuration, but for the addresses of functions that each call of the base makes anew."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(config.to_dict()))


@pytest.mark.parametrize(
    ("module", "config", "overrides"),
    [
        ("monarch_titan", "llama3_debug_diloco", []),
        ("monarch_titan", "deepseek_v3_debug_diloco", ["dataloader.dataset_path=/x", "monarch.min_replicas=2"]),
        ("llama3", "llama3_debugmodel", ["lr_scheduler.decay_ratio=null", "debug.seed=null"]),
        ("llama3", "llama3_debugmodel", ["activation_checkpoint=null", "training.max_norm=inf"]),
        ("llama3", "llama3_debugmodel", ["override.imports=[a.b,[c.d,{x:{y:null}}]]", "dump_folder='quotes \" and é'"]),
        ("llama3", "llama3_debugmodel", ["parallelism.module_fqns_per_model_part=[[a,b],[]]", "compile.components=[]"]),
        ("llama3", "llama3_debugmodel", ["optimizer.param_groups=[{pattern: a, optimizer_name: Adam}]"]),
        ("llama3", "llama3_debugmodel", ["optimizer.param_groups=[]", "optimizer.param_groups=[]"]),
        ("llama3", "llama3_debugmodel", ["optimizer.optimizer_factory_kwargs_by_name={AdamW: {a: {b: 1e-30}}}"]),
        ("gpt_oss", "gpt_oss_debugmodel", ["optimizer.param_groups.0.optimizer_kwargs.lr=1e-9"]),
        ("qwen3", "qwen3_debugmodel", []),
    ],
)
def test_round_trip(tmp_path, resolve, module, config, overrides):
    before = resolve(module, config, *overrides)
    assert comparable(reload(tmp_path, to_toml(before))) == comparable(before)


def test_round_trip_of_what_was_changed_in_python(tmp_path, resolve):
    before = resolve("llama3", "llama3_debugmodel")
    before.training.steps = 7
    before.lr_scheduler.decay_ratio = None
    before.monarch.recovery.respawns = 2
    assert comparable(reload(tmp_path, to_toml(before))) == comparable(before)


def test_base_is_the_first_table(resolve):
    text = to_toml(resolve("monarch_titan", "llama3_debug_diloco"))
    assert re.search(r"^\[.*", text, re.M)[0] == "[torchtitan]"
    assert list(tomli.loads(text))[:3] == ["hf_assets_path", "dump_folder", "torchtitan"]


def test_none_is_said_only_where_the_base_says_otherwise(resolve):
    content = tomli.loads(to_toml(resolve("llama3", "llama3_debugmodel", "lr_scheduler.decay_ratio=null")))
    assert content["lr_scheduler"]["decay_ratio"] == "null"
    assert "total_steps" not in content["lr_scheduler"]
    assert "seed" not in content["debug"]


def test_code_is_left_to_the_base(resolve):
    content = tomli.loads(to_toml(resolve("llama3", "llama3_debugmodel")))
    assert "model_spec" not in content
    assert "trace_post_processor" not in content["profiler"]


def test_configuration_without_a_base_is_shown_but_cannot_be_loaded(tmp_path, resolve):
    config = resolve("llama3", "llama3_debugmodel", "training.steps=7")
    config.torchtitan.module = config.torchtitan.config = ""
    text = to_toml(config)
    assert text.startswith("# Made in Python: to train this file, name the configuration function")
    assert tomli.loads(text)["training"]["steps"] == 7
    with pytest.raises(ConfigError, match="add what to start from"):
        reload(tmp_path, text)


def test_what_was_exchanged_in_python_is_named(resolve):
    config = resolve("llama3", "llama3_debugmodel")
    assert "exchanged" not in to_toml(config)
    config.model_spec = model_registry("8B")
    config.loss = MSELoss.Config()
    assert re.findall(r"# (\w+) was exchanged in Python", to_toml(config)) == ["model_spec", "loss"]


def test_policy_of_activation_checkpointing_is_said(tmp_path, resolve):
    config = resolve("llama3", "llama3_debugmodel")
    config.activation_checkpoint = FullAC.Config(preserve_rng_state=False)
    text = to_toml(config)
    assert tomli.loads(text)["activation_checkpoint"]["mode"] == "full"
    assert comparable(reload(tmp_path, text)) == comparable(config)
