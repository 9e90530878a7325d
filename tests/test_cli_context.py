"""The commands about lengths: `rotary decay`, `rotary reach`, `rotary plan`."""

import json
import resource
from importlib.resources import files
from pathlib import Path

import pytest
from command import assert_refused, document

from rotary import Rotary, from_hf_config
from rotary.analysis.bounds import similarity
from rotary.analysis.decay import decay_curve
from rotary.cli.context import write_new

LLAMA = str(files("rotary") / "configs" / "llama-3.1-8b.json")
CONFIGS = Path(__file__).parent / "configs"
DEEPSEEK = str(CONFIGS / "deepseek-v3.json")
LLAMA_2, GEMMA = str(CONFIGS / "llama-2-7b.json"), str(CONFIGS / "gemma-3-1b.json")
MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def test_decay_ends_at_the_window_and_says_so(main):
    config = str(CONFIGS / "mistral-7b-v0.1.json")
    assert document(main("decay", config, "--json"))["distance"][-1] == 4096
    assert "no farther than their window, 4,096 tokens" in " ".join(
        main("decay", config).out.split()
    )


def test_decay_prints_what_the_analysis_computes(main):
    found = document(main("decay", LLAMA_2, "--json"))
    assert found["distance"] == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 4096]
    spec = Rotary(head_dim=128)
    assert found["mean_partial_sum"] == decay_curve(spec, found["distance"]).tolist()
    assert found["similarity"] == similarity(spec, found["distance"]).tolist()
    shown = main("decay", LLAMA_2, "--length", "1000")
    assert "10.227" in shown.out
    assert shown.out.splitlines()[-1].split() == ["1,000", "4.471", "10.178"]


def test_reach_tells_numbers_and_a_verdict(main):
    found = document(main("reach", LLAMA_2, "--json"))
    assert (found["first_failure"], found["critical_dimension"]) == (1707, 92)
    shown = " ".join(main("reach", LLAMA_2).out.split())
    assert "first B_m < 0 distance 1,707" in shown
    assert found["verdict"] in shown


def test_reach_tells_of_every_layer_type(main):
    found = document(main("reach", GEMMA, "--json"))
    assert {kind: each["length"] for kind, each in found.items()} == {
        "full_attention": 32768, "sliding_attention": 512,
    }  # fmt: skip
    only = document(main("reach", GEMMA, "--layer-type", "sliding_attention", "--json"))
    assert only == found["sliding_attention"]


def test_the_plot_of_reach_shows_what_its_text_says(main, monkeypatch):
    """Gemma's sliding layers see 512 tokens; their first failure, 2,653, is beyond."""
    drawn = []
    monkeypatch.setattr("rotary.plots.save", lambda figure, target: drawn.append(figure))
    for config, words in ((GEMMA, "ding_attention: none to 512"),
                          (DEEPSEEK, "v3.json: none to 163,840")):  # fmt: skip
        assert main("reach", config, "--plot", "picture.svg").code == 0
        names = [text.get_text() for text in drawn[-1].legends[0].get_texts()]
        assert any(name.endswith(words) for name in names), names


def test_the_similarity_of_latent_attention_is_that_of_the_whole_head(main):
    found = document(main("decay", DEEPSEEK, "--length", "5000", "--json"))
    spec = from_hf_config(DEEPSEEK)
    assert found["similarity"] == similarity(spec, found["distance"], still=64).tolist()


def test_a_plan_that_keeps_the_rope_writes_its_length(main, tmp_path):
    """The attention factor of LongRoPE is that of its length in most programs."""
    source, target = CONFIGS / "phi-3.5-mini.json", tmp_path / "config.json"
    arguments = ("plan", "--context", "256", "--from", str(source), "--out", str(target))
    assert main(*arguments).code == 0
    before, after = json.loads(source.read_text()), json.loads(target.read_text())
    assert after["max_position_embeddings"] == before["max_position_embeddings"]
    assert from_hf_config(after) == from_hf_config(before)


def test_a_plan_for_training_has_the_bases_and_json_for_transformers(main):
    arguments = ("plan", "--context", "1024", "--head-dim", "64")
    found = document(main(*arguments, "--json"))
    assert found["min_base"] == pytest.approx(7.7530e3, rel=1e-4)
    assert found["min_base"] < found["safe_base"] <= found["recommended"]["base"]
    assert found["first_failure"] < 1024
    shown = main(*arguments).out
    written = json.loads(shown[shown.index("{") :])
    assert written == found["rope_parameters"]
    assert from_hf_config(written) == Rotary.from_dict(found["recommended"])
    assert " ".join(found["reason"].split()) in " ".join(shown.split())


def test_a_plan_for_weights_compares_the_methods(main):
    shown = main("plan", "--context", "2048", "--head-dim", "64", "--trained", "512").out
    for method in ("none", "linear", "ntk", "ntk_mixed", "yarn", "llama3", "longrope"):
        assert f" {method} " in shown
    assert "factor 4" in shown


@pytest.mark.parametrize(
    ("suffix", "arguments"),
    [("pdf", ("decay", LLAMA_2)), ("png", ("reach", GEMMA)),
     ("svg", ("plan", "--context", "512", "--head-dim", "64"))],
    ids=lambda value: value if isinstance(value, str) else value[0],
)  # fmt: skip
def test_a_plot_is_written(main, tmp_path, suffix, arguments):
    target = tmp_path / f"picture.{suffix}"
    assert main(*arguments, "--plot", str(target)).code == 0
    assert target.read_bytes().startswith(MAGIC[suffix])
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["picture", "picture.gif", "nowhere/picture.png"])
def test_a_plot_that_cannot_be_written_is_one_line(main, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    done = main("decay", LLAMA_2, "--plot", name)
    assert_refused(done, name.rsplit("/", 1)[0])
    assert list(tmp_path.iterdir()) == []


def test_a_reach_without_rotation_is_not_drawn(main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"model_type": "falcon", "alibi": true}')
    assert "none: these layers have no rotary embedding" in main("reach", "config.json").out
    done = main("reach", "config.json", "--plot", "picture.png")
    assert_refused(done, "config.json: has no rotation, so there is nothing to draw")
    assert not Path("picture.png").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("decay", LLAMA_2, "--length", "0"), "must be in 1"),
        (("decay", LLAMA_2, "--length", "-7"), "must be in 1"),
        (("reach", LLAMA_2, "--length", "1000000000000000"), "must be in 1"),
        (("decay", GEMMA), "pass --layer-type, one of full_attention, sliding_attention"),
        (("plan", "--context", "1"), "context must be in 2"),
        (("plan", "--context", "1000000000000000"), "context must be in 2"),
        (("plan", "--context", "512", "--head-dim", "63"), "rotary_dim must be even"),
        (("plan", "--context", "512", "--base", "nan"), "base must be"),
        (("plan", "--context", "512", "--base", "-1"), "base must be"),
        (("plan", "--context", "512", "--trained", "0"), "trained must be in 1"),
        (("plan", "--context", "512", "--from", LLAMA, "--base", "7"), "--base cannot be used"),
        (("plan", "--context", "512", "--layer-type", "x"), "give --from as well"),
        (("plan", "--context", "512", "--from", "nowhere"), "nowhere"),
        (("decay", "model.gguf", "--length", "9"), "a GGUF file; give the config.json"),
        (("design", "--from", "model.gguf", "--length", "9"), "a GGUF file; give the config.json"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, tuple) else "",
)
def test_nonsense_is_one_line(main, arguments, part):
    assert_refused(main(*arguments), part)


@pytest.mark.filterwarnings("always:base 1 gives:UserWarning")
def test_a_warning_is_told_once(main):
    done = main("plan", "--context", "512", "--base", "1", "--head-dim", "64")
    assert done.err.count("warning: base 1 gives every pair the same frequency") == 1


def test_a_model_name_cannot_steer_the_terminal(main, tmp_path):
    path = tmp_path / "\x1b[31m[bold]<b>.json"
    path.write_text(Path(LLAMA_2).read_text())
    for command in ("decay", "reach"):
        done = main(command, str(path))
        assert done.code == 0
        assert "\x1b" not in done.out
        assert "[bold]<b>.json" in "".join(done.out.split("\n"))


def test_a_plan_from_a_config_reads_its_training_and_writes_the_whole_config(main, tmp_path):
    path, new = tmp_path / "config.json", tmp_path / "longer.json"
    old = {**json.loads(Path(LLAMA_2).read_text()), "max_position_embeddings": 512}
    path.write_text(json.dumps(old))
    done = main("plan", "--context", "1024", "--from", str(path), "--out", str(new), "--json")
    plan, written = document(done), json.loads(new.read_text())
    assert (plan["trained"], plan["action"]) == (512, "scaling")
    assert plan["recommended"]["params"]["factor"] == 2.0
    assert from_hf_config(new).to_dict() == plan["recommended"]
    changed = {key for key in written if written[key] != old.get(key)}
    assert changed == {"max_position_embeddings", "rope_theta", "rope_scaling"}
    assert set(old) <= set(written)


@pytest.mark.parametrize(("arguments", "message"), [
    (("--head-dim", "64"), "--out writes the config of a trained model; give --from as well"),
    (("--from", LLAMA_2), "the file exists; name a new one"),
], ids=["no config", "a file that exists"])  # fmt: skip
def test_a_plan_that_cannot_be_written(main, tmp_path, arguments, message):
    new = tmp_path / "config.json"
    new.write_text("mine")
    done = main("plan", "--context", "1024", *arguments, "--out", str(new))
    assert_refused(done, message)
    assert new.read_text() == "mine"


def test_a_link_to_nothing_is_refused_before_the_search(main, tmp_path, monkeypatch):
    """The search of minutes ended with "File exists"."""
    monkeypatch.setattr("rotary.plan.plan_model", lambda *_, **__: pytest.fail("it searches"))
    new = tmp_path / "config.json"
    new.symlink_to(tmp_path / "nothing")
    done = main("plan", "--context", "1024", "--from", LLAMA_2, "--out", str(new))
    assert_refused(done, f"--out {new}: the file exists; name a new one")


@pytest.mark.parametrize(("files", "message"), [
    (("--out", "nowhere/config.json"), "there is no folder nowhere; make it"),
    (("--out", "config.json", "--plot", "picture.gif"), "written as .png, .svg or .pdf"),
    (("--out", "config.json", "--plot", "nowhere/picture.png"), "nowhere"),
    (("--out", "both.png", "--plot", "both.png"), "--out and --plot are one file, both.png"),
])  # fmt: skip
@pytest.mark.parametrize("command", [
    ("plan", "--context", "16384"), ("design", "--length", "64", "--keep", "16")
], ids=lambda command: command[0])  # fmt: skip
def test_a_file_is_refused_before_the_search(main, tmp_path, monkeypatch, command, files, message):
    monkeypatch.chdir(tmp_path)
    for search in ("rotary.plan.plan_model", "rotary.analysis.ladders.design"):
        monkeypatch.setattr(search, lambda *_, **__: pytest.fail("the search began"))
    assert_refused(main(*command, "--from", LLAMA_2, *files), message)
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_cannot_be_written_is_refused_before_the_search(main, tmp_path, monkeypatch):
    monkeypatch.setattr("rotary.plan.min_base", lambda *_, **__: pytest.fail("the search began"))
    data = {**json.loads(Path(GEMMA).read_text()), "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(data))
    done = main("plan", "--context", "600", "--from", str(tmp_path), "--layer-type",
                "sliding_attention", "--out", str(tmp_path / "new.json"), "--plot",
                str(tmp_path / "new.png"))  # fmt: skip
    assert_refused(done, "read the same keys of this config")
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]


def test_a_config_is_written_whole_or_not_at_all(tmp_path):
    """As on a disk that is full after eight bytes: `rotary plan --out`, `rotary design --out`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_new(tmp_path / "config.json", {"head_dim": 128})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    write_new(tmp_path / "config.json", {"head_dim": 128})
    assert json.loads((tmp_path / "config.json").read_text()) == {"head_dim": 128}
