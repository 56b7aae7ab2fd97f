"""TOML files and ``key=value`` arguments become a configuration, or one line that says what is wrong with them."""

import dataclasses
import re
import subprocess
import sys

import pytest
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from monarch_titan.config.base import as_monarch
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.loader import load
from monarch_titan.config.sections import Base
from monarch_titan.config.writer import to_toml
from monarch_titan.training.trainer import MonarchTrainer

BASE = '[torchtitan]\nmodule = "monarch_titan"\nconfig = "llama3_debug_diloco"\n'


@pytest.fixture
def write(tmp_path):
    def write(text=BASE, name="run.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a user's module with configuration functions and puts it on the path."""

    def package(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return f'[torchtitan]\nmodule = "{name}"\nconfig = "mine"\n'

    return package


# What is applied ----------------------------------------------------------------------------------------------------


def test_base_then_file_then_command_line(write):
    file = write(BASE + "[training]\nseq_len = 64\nlocal_batch_size = 3\n")
    training = load(file, "training.local_batch_size=4", "training.local_batch_size=5").training
    assert (training.steps, training.seq_len, training.local_batch_size) == (100, 64, 5)


def test_base_is_chosen_on_the_command_line_too(write):
    config = load(write(), "torchtitan.config=deepseek_v3_debug_diloco")
    assert config.model_spec.name == "deepseek_v3"
    assert config.torchtitan.config == "deepseek_v3_debug_diloco"


@pytest.mark.parametrize("module", ["llama3", "torchtitan.models.llama3", "torchtitan.models.llama3.config_registry"])
def test_base_is_found_as_torchtitan_finds_it(write, module):
    config = load(write(f'[torchtitan]\nmodule = "{module}"\nconfig = "llama3_debugmodel"\n'))
    assert config.model_spec.flavor == "debugmodel"
    assert config.monarch.num_replicas == 1


def test_configuration_of_the_core_trainer_keeps_all_fields():
    base = llama3_debugmodel()
    config = as_monarch(base)
    assert type(config) is MonarchTrainer.Config
    assert all(getattr(config, name) is getattr(base, name) for name in base.to_dict())


def test_base_may_be_shared_and_is_not_changed(write, package):
    text = "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
    file = write(package("shared_conf", text + "SHARED = llama3_debugmodel()\ndef mine():\n    return SHARED\n"))
    load(file, "training.steps=7", "optimizer.param_groups.0.optimizer_kwargs.lr=7", "override.imports=[a.b]")
    assert load(file, "fault_tolerance.enable=true").to_dict() == as_monarch(
        sys.modules["shared_conf"].SHARED
    ).to_dict() | {"torchtitan": dataclasses.asdict(Base(module="shared_conf", config="mine"))}


@pytest.mark.parametrize(
    ("override", "option", "value"),
    [
        ("dump_folder=2024", "dump_folder", "2024"),
        ("dump_folder=a/b c", "dump_folder", "a/b c"),
        ("lr_scheduler.decay_ratio=1", "lr_scheduler.decay_ratio", 1.0),
        ("lr_scheduler.decay_ratio=null", "lr_scheduler.decay_ratio", None),
        ("lr_scheduler.min_lr_factor=1e-3", "lr_scheduler.min_lr_factor", 1e-3),
        ("training.max_norm=2", "training.max_norm", 2),
        ("monarch.min_replicas=2", "monarch.min_replicas", 2),
        ("compile.components=[loss]", "compile.components", ["loss"]),
        ("compile.components.1=head", "compile.components", ["model", "head"]),
        ("override.imports=[a.b,[c.d,{x:1}]]", "override.imports", ["a.b", ("c.d", {"x": 1})]),
        ("parallelism.module_fqns_per_model_part=[[a],[b]]", "parallelism.module_fqns_per_model_part", [["a"], ["b"]]),
        ("activation_checkpoint=null", "activation_checkpoint", None),
    ],
)
def test_value_takes_the_type_of_its_field(write, override, option, value):
    found = load(write(), override)
    for name in option.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("more", "joins"),
    [
        ("", False),
        ("[training]\nsteps = 5\n", False),
        ("[monarch]\nnum_replicas = 1\n", True),
        ("[fault_tolerance]\n", True),
    ],
)
def test_plain_torchtitan_stays_plain_where_nobody_speaks_of_replicas(write, more, joins):
    config = load(write(f'[torchtitan]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n{more}'))
    assert config.fault_tolerance.enable == joins


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ([], 1),
        (["parallelism.tensor_parallel_degree=8"], 8),
        (["parallelism.tensor_parallel_degree=2", "parallelism.data_parallel_shard_degree=4"], 8),
        (["parallelism.expert_parallel_degree=4", "training.disable_cuda_graphs=true"], 4),
        (["parallelism.tensor_parallel_degree=2", "monarch.procs_per_host=4"], 4),
        (["parallelism.tensor_parallel_degree=2", "monarch.procs_per_host=1"], 1),
        (["parallelism.tensor_parallel_degree=0"], 1),
    ],
)
def test_as_many_ranks_as_the_degrees_need_unless_it_is_said(write, overrides, ranks):
    file = write('[torchtitan]\nmodule = "deepseek_v3"\nconfig = "deepseek_v3_debugmodel"\n')
    assert load(file, *overrides).monarch.ranks_per_replica == ranks


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('flavor = "8BB"', "torchtitan.flavor: llama3 has no '8BB'; did you mean 8B?"),
        ('flavor = "8B"\nattn_backend = "sdpa"', "torchtitan.flavor: llama3 8B cannot be made: "),
        (
            'flavor = "8B"\nmoe_comm_backend = "deepep"',
            "torchtitan.moe_comm_backend: the models of llama3 have no such",
        ),
        ("converters = {float8 = {}}", "torchtitan.converters.float8 must be one of float8_linear,"),
        ("converters = {float8_linear = 5}", "torchtitan.converters"),
        ("converters = {float8_linear = {enable = 1}}", "torchtitan.converters.float8_linear.enable must be true or"),
        (
            "converters = {float8_linear = {filter = []}}",
            "unknown option torchtitan.converters.float8_linear.filter; did",
        ),
        ("converters = {float8_linear = {recipe_name = 'x'}}", 'float8_linear.recipe_name must be one of "rowwise", '),
        ("converters = {float8_linear = {model_compile_enabled = true}}", "is derived from compile.enable."),
    ],
)
def test_bad_model(write, table, message):
    file = write(f'[torchtitan]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n{table}\n')
    with pytest.raises(ConfigError) as error:
        load(file)
    assert re.match(rf"{re.escape(str(file))}:[45]: ", str(error.value))
    assert message in str(error.value)


def test_flavor_exchanges_the_model_and_fits_the_loss(write):
    base = '[torchtitan]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'
    config = load(write(base + 'flavor = "8B"\n'))
    assert config.model_spec.flavor == "8B"
    assert config.training.steps == 10  # of the configuration function
    assert config.loss.loss_fn.global_vocab_size == 128_256


def test_flavor_alone_is_surrounded_by_torchtitans_defaults(write):
    config = load(write('[torchtitan]\nmodule = "qwen3"\nflavor = "0.6B"\n'))
    assert (config.model_spec.flavor, config.training.steps) == ("0.6B", 10_000)


def test_null_in_toml_is_a_string(write):
    config = load(write('activation_checkpoint = "null"\n' + BASE + '[lr_scheduler]\ndecay_ratio = "null"\n'))
    assert config.activation_checkpoint is None
    assert config.lr_scheduler.decay_ratio is None


def test_section_is_laid_over_what_the_base_has_there(write):
    config = load(write(BASE + "[dataloader]\nnum_workers = 0\n[loss]\nnum_chunks = 4\n"))
    assert type(config.dataloader).__qualname__ == "LocalTextDataLoader.Config"
    assert (config.loss.num_chunks, type(config.loss.loss_fn).__qualname__) == (4, "CrossEntropyLoss.Config")


def test_local_text_is_for_validation_too(write):
    text = '[torchtitan]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n[validator.dataloader]\n'
    config = load(write(text + 'dataset = "local_text"\n'))
    assert type(config.validator.dataloader).__qualname__ == "LocalTextDataLoader.Config"
    assert type(config.dataloader).__qualname__ != "LocalTextDataLoader.Config"
    assert not config.validator.dataloader.infinite
    text = to_toml(config)
    assert load(write(text, "again.toml")).to_dict()["validator"] == config.to_dict()["validator"]


def test_list_replaces_and_index_changes_one_item(write):
    groups = "[[optimizer.param_groups]]\npattern = 'bias'\noptimizer_name = 'Adam'\n"
    groups += "[[optimizer.param_groups]]\npattern = '.*'\noptimizer_name = 'AdamW'\noptimizer_kwargs = {lr = 0.1}\n"
    first, second = load(write(BASE + groups), "optimizer.param_groups.1.optimizer_kwargs.eps=1").optimizer.param_groups
    assert (first.pattern, first.optimizer_name, first.optimizer_kwargs) == ("bias", "Adam", {})
    assert second.optimizer_kwargs == {"lr": 0.1, "eps": 1}


def test_one_key_of_a_dictionary_leaves_the_others(write):
    (group,) = load(write(), "optimizer.param_groups.0.optimizer_kwargs.lr=0.5").optimizer.param_groups
    assert group.optimizer_kwargs["lr"] == 0.5
    assert group.optimizer_kwargs["weight_decay"] == 0.1


def test_list_over_a_tuple_stays_a_tuple(write):
    (group,) = load(write(), "optimizer.param_groups.0.optimizer_kwargs.betas=[0.8,0.9]").optimizer.param_groups
    assert group.optimizer_kwargs["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("order", [1, -1])
def test_sections_are_validated_when_all_is_applied(write, order):
    overrides = ["compile.enable_async_tensor_parallel=true", "compile.enable=true"][::order]
    assert load(write(), *overrides).compile.enable_async_tensor_parallel


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.step=1", "unknown option training.step; did you mean training.steps?"),
        ("training.local-batch-size=1", "unknown option training.local-batch-size; did you mean training.local_batch"),
        ("traning.steps=1", "unknown option traning; did you mean training?"),
        ("steps=1", "unknown option steps; did you mean training.steps?"),
        ("monarch.respawns=1", "unknown option monarch.respawns; did you mean monarch.recovery.respawns?"),
        ("optimizer.lr=1", "unknown option optimizer.lr; did you mean optimizer.param_groups.0.optimizer_kwargs.lr?"),
        ("loss.loss_fn.x=1", "unknown option loss.loss_fn.x; there are: global_vocab_size."),
        ("tokenizer.x=1", "unknown option tokenizer.x; there are: none."),
        ("training._x=1", "unknown option training._x; there are: local_batch_size,"),
        ("training.steps=ten", 'training.steps must be an integer, got "ten".'),
        ("training.steps=1.5", "training.steps must be an integer, got 1.5."),
        ("training.steps=true", "training.steps must be an integer, got true."),
        ("training.steps=null", "training.steps must be an integer, got null."),
        ("training.steps=[1]", "training.steps must be an integer, got [1]."),
        ("training.steps.x=1", 'training.steps must be an integer, got {"x": 1}.'),
        ("training=5", "training must be a table, got 5."),
        ("training.max_norm=x", 'training.max_norm must be a number, got "x".'),
        ("training.max_norm=true", "training.max_norm must be a number, got true."),
        ("training.dtype=fp8", 'training.dtype must be one of "bfloat16", "float32", got "fp8".'),
        ("monarch.scheduler=pbs", 'monarch.scheduler must be one of "local", "slurm", "kubernetes", "skypilot", got'),
        ("monarch.min_replicas=x", 'monarch.min_replicas must be an integer or "null", got "x".'),
        ("compile.enable=1", "compile.enable must be true or false, got 1."),
        ("compile.components=model", 'compile.components must be a list whose items are each a string, got "model".'),
        ("compile.components=[model,1]", "compile.components.1 must be a string, got 1."),
        ("compile.components.2=x", "compile.components has 2 item(s), counted from 0; got '2'."),
        ("override.imports=[[a]]", 'override.imports.0 must be a string or a list of 2 items, got ["a"].'),
        ("optimizer.param_groups.a.pattern=x", "optimizer.param_groups has 1 item(s), counted from 0; got 'a'."),
        ("optimizer.param_groups=[{pattern: a}]", "optimizer.param_groups.0 needs optimizer_name."),
        (
            "optimizer.param_groups=[{pattern: a, optimizer_name: b, lr: 1}]",
            "unknown option optimizer.param_groups.0.lr; there are: pattern, optimizer_name, optimizer_kwargs.",
        ),
        ("dump_folder=[a]", 'dump_folder must be a string, got ["a"].'),
        ("activation_checkpoint=full", 'activation_checkpoint must be a table or "null", got "full".'),
        ("model_spec=x", "model_spec is code and cannot be set here; it comes from torchtitan.config."),
        ("model_spec.flavor=8B", "model_spec is code and cannot be set here"),
        ("profiler.trace_post_processor.fn=f", "profiler.trace_post_processor is code and cannot be set here"),
        ("fault_tolerance.replica_id=1", "fault_tolerance.replica_id is derived by the controller"),
        ("fault_tolerance.group_size=4", "(it is the number of replicas) and cannot be set; use monarch.num_replicas."),
        ("checkpoint.keep_latest_k=1", "checkpoint: We need to maintain at least 2 checkpoint replicas"),
        ("validator.steps=0", "validator: validation steps must be positive or -1"),
        ("torchtitan.config=llama3_debug_dilco", "has no function 'llama3_debug_dilco'; did you mean llama3_debug_dil"),
        (
            "torchtitan.config=as_monarch",
            "torchtitan.config: monarch_titan.config_registry has no function 'as_monarch'",
        ),
        (
            "torchtitan.module=lama3",
            "torchtitan.module: there is no module 'lama3' on the Python path; did you mean lla",
        ),
        ("torchtitan.module=../x", "torchtitan.module must be the name of a module, got '../x'."),
        ("training.steps", "'training.steps' is not of the form key=value, as in training.steps=100."),
        ("=1", "'=1' is not of the form key=value"),
        ("a..b=1", "'a..b=1' is not of the form key=value"),
        ("+training.steps=1", "'+training.steps=1' is not of the form key=value"),
        ("~training.steps", "'~training.steps' is not of the form key=value"),
        (
            "training.steps=1,2",
            "'training.steps=1,2' is a sweep, and this is one run; for a list write training.steps=[",
        ),
        ("dump_folder=s3://a=b", "quote a text with special characters, as in 'dump_folder=\"s3://a=b\"'."),
    ],
)
def test_bad_override_is_one_line(write, override, message):
    with pytest.raises(ConfigError) as error:
        load(write(), override)
    assert str(error.value).startswith("command line: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        (
            "",
            "",
            'add what to start from: a table [torchtitan] with module = "llama3" and config = "llama3_debugmodel"',
        ),
        ('[torchtitan]\nmodule = "llama3"\n', "", "add what to start from"),
        ("steps =\n", ":1:8", "not TOML: Invalid value."),
        (BASE + "[training]\nsteps = 1\nsteps = 2\n", ":6:10", "not TOML: Cannot overwrite a value."),
        ("torchtitan = 5", ":1", "torchtitan must be a table, got 5."),
        (
            BASE + "[monarch]\n\nreplicas = 4\n",
            ":6",
            "unknown option monarch.replicas; did you mean monarch.num_replicas?",
        ),
        (
            BASE + "[ monarch.recovery ]\nrespawns = '4'\n",
            ":5",
            'monarch.recovery.respawns must be an integer, got "4".',
        ),
        (BASE + "[trainig]\n", ":4", "unknown option trainig; did you mean training?"),
        (BASE + "[training]\nsteps = 2020-01-01\n", ":5", 'training.steps must be an integer, got "2020-01-01".'),
        (
            BASE + "[[optimizer.param_groups]]\n[optimizer.param_groups.optimizer_kwargs]\nlr = 1\n"
            "[[optimizer.param_groups]]\npattern = 1\noptimizer_name = 'Adam'\n",
            ":4",
            "optimizer.param_groups.0 needs pattern and optimizer_name.",
        ),
        (BASE + "[fault_tolerance]\ngroup_size = 8\n", ":5", "fault_tolerance.group_size is derived by the controller"),
        (BASE + "[debug]\nbatch_invariant = true\n", "", "Batch-invariant mode is not supported in pre-training."),
        (BASE + "[checkpoint]\nkeep_latest_k = 1\n", "", "checkpoint: We need to maintain at least 2"),
    ],
)
def test_bad_file_is_one_line_with_its_place(write, text, where, message):
    file = write(text)
    with pytest.raises(ConfigError) as error:
        load(file)
    assert str(error.value).startswith(f"{file}{where}: {message}")


def test_section_of_two_sources_names_both(write):
    file = write(BASE + "[checkpoint]\nkeep_latest_k = 1\n")
    with pytest.raises(ConfigError, match=f"^{re.escape(str(file))} and command line: checkpoint: "):
        load(file, "checkpoint.interval=3")


def test_line_inside_the_second_of_two_items(write):
    item = "[[optimizer.param_groups]]\npattern = '.*'\noptimizer_name = {}\n"
    with pytest.raises(ConfigError, match=r":9: optimizer.param_groups.1.optimizer_name must be a string, got 2."):
        load(write(BASE + item.format("'Adam'") + item.format(2)))


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: None, "cannot read this file: No such file or directory."),
        (lambda path: path.mkdir(), "cannot read this file: Is a directory."),
        (lambda path: path.write_bytes(b"\xff"), "this file is not UTF-8 text."),
    ],
)
def test_unusable_file(tmp_path, prepare, message):
    path = tmp_path / "run.toml"
    prepare(path)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import not_installed_here", "torchtitan.module: {} needs not_installed_here, which is not installed."),
        ("from os import nothing", "torchtitan.module: {} cannot be imported: cannot import name 'nothing'"),
        ("def mine():\n    raise ValueError('no GPU')", "torchtitan.config: mine cannot be used here: no GPU"),
        ("def mine():\n    import nowhere", "torchtitan.config: mine cannot be used here: No module named 'nowhere'"),
        ("def mine(x):\n    pass", "torchtitan.config: {} has no function 'mine'; there are: ."),
        (
            "def mine():\n    return 5",
            "torchtitan.config must give the Config of TorchTitan's Trainer or one derived, got",
        ),
    ],
)
def test_base_that_cannot_be_used(write, package, request, body, message):
    name = f"conf_{abs(hash(request.node.name))}"
    file = write(package(name, body))
    with pytest.raises(ConfigError, match=r"run\.toml:[23]: " + re.escape(message.format(name))):
        load(file)


def test_other_trainers_are_refused():
    other = type("Config", (Trainer.Config,), {"__slots__": ()})
    with pytest.raises(ConfigError, match=r"must give the Config of TorchTitan's Trainer or one derived"):
        as_monarch(other())


@pytest.mark.parametrize(
    ("text", "override"),
    [
        (None, "training.steps=1"),
        ("steps =", "training.steps=1"),
        (BASE, "training.steps"),
        (BASE, "monarch.replicas=1"),
        ("[torchtitan]\nmodule = 'llama3'\n", "training.steps=1"),
    ],
)
def test_cheap_mistakes_are_found_before_torch_is_imported(tmp_path, text, override):
    file = tmp_path / "run.toml"
    if text is not None:
        file.write_text(text)
    script = (
        "import sys\nfrom monarch_titan.config.loader import load, ConfigError\n"
        "try:\n    load(*sys.argv[1:])\nexcept ConfigError:\n    sys.exit('torch' in sys.modules)\nsys.exit(3)"
    )
    command = [sys.executable, "-c", script, file, override]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


def test_any_model_trains_on_local_text_with_the_byte_tokenizer(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(
        'hf_assets_path = "byte_tokenizer"\n[torchtitan]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'
        '[dataloader]\ndataset = "local_text"\ninfinite = false\n'
    )
    config = load(file, "training.steps=20")
    assert type(config.dataloader).__qualname__ == "LocalTextDataLoader.Config"
    assert type(config.tokenizer).__qualname__ == "ByteTokenizer.Config"
    assert config.dataloader.infinite is False
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert "exchanged" not in again.read_text()
    assert to_toml(load(again)) == to_toml(config)
