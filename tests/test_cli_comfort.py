"""Claims: `osdp` alone helps; shells complete it; a network, an attention kernel and the allocator are as asked for; a
run reads a TOML file.
"""

from __future__ import annotations

import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from osdp.cli.main import build_parser, main
from osdp.cli.plan import with_rates
from osdp.cluster import Cluster, parse_rate
from osdp.errors import UsageError


def test_osdp_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: osdp") and "examples:" in out and err == ""


def test_bash_completes_commands_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "osdp.bash"
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        line = f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}"
        function = subprocess.run(
            ["bash", "-c", f"source {script}; complete -p osdp"], capture_output=True, text=True, check=True
        ).stdout.split()
        name = function[function.index("-F") + 1]
        code = f'source {script}; {line}; {name}; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert {"plan"} <= set(completed("osdp", "pla"))
    assert set(completed("osdp", "re")) == {"report"}
    assert "--cluster" in completed("osdp", "plan", "--clu")


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "whatif" in capsys.readouterr().out


def test_rates_are_read_as_data_sheets_write_them() -> None:
    assert parse_rate("200Gbit") == parse_rate("200 Gbit/s") == parse_rate("200Gb/s") == 25e9
    assert parse_rate("25GB/s") == parse_rate("25GB") == 25e9
    for wrong in ("200", "fast", "0Gbit", "-1Gbit", "200Gibit", "9e9Gbit"):
        with pytest.raises(UsageError, match="200Gbit"):
            parse_rate(wrong)


def test_an_attention_kernel_and_the_allocator_are_what_is_asked_for() -> None:
    asked = ["plan", "gpt-tiny", "--cluster", "8xA100-80GB", "--attention", "flash-1", "--expandable-segments"]
    usual = Cluster.parse("8xA100-80GB")
    cluster = with_rates(build_parser().parse_args(asked))
    assert cluster.device == usual.device.with_attention("flash-1")
    assert cluster.reserve["fragmentation"] == pytest.approx(usual.reserve["fragmentation"] / 2, rel=1e-6)
    assert with_rates(build_parser().parse_args(asked[:4])) == usual


def test_a_network_is_reached_in_the_same_part_as_the_usual_one() -> None:
    cluster = Cluster.parse("2x8xA100-80GB")  # whose usual network is 8 x 200 Gbit/s
    same = cluster.with_network(parse_rate("1600Gbit"))
    assert same.network.bytes_per_second == pytest.approx(cluster.network.bytes_per_second)
    eighth = cluster.with_network(parse_rate("200Gbit"))
    assert eighth.network.bytes_per_second == pytest.approx(cluster.network.bytes_per_second / 8)
    slower = eighth.collective_seconds("all_gather", "world", 1 << 30)
    assert slower > cluster.collective_seconds("all_gather", "world", 1 << 30)
    with pytest.raises(UsageError, match="one node"):
        Cluster.parse("8xA100-80GB").with_network(25e9)


# ---- the configuration of a run


def parsed(*words: str) -> Namespace:
    return build_parser().parse_args(["train", *words])


def config(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def test_a_file_replaces_the_defaults_and_the_command_line_wins(tmp_path: Path) -> None:
    text = """
        model = "gpt-tiny"
        steps = 7
        lr = 3e-4
        data = ["a.txt", "b.txt"]
        global_batch = 8
        no-split = true
        modes = ["keep", "free"]
        pin = ["lm_head=keep"]
        memory = "1GiB"
    """
    path = config(tmp_path, text)
    found = parsed("--config", path)
    assert (found.model, found.steps, found.lr, found.global_batch) == ("gpt-tiny", 7, 3e-4, 8)
    assert [str(each) for each in found.data] == ["a.txt", "b.txt"]
    assert found.no_split and found.modes == ("keep", "free") and found.pin == [("lm_head", "keep")]
    assert found.memory == 1 << 30
    over = parsed("gpt2", "--steps", "100", f"--config={path}")  # 100 is the option's own default
    assert (over.model, over.steps, over.lr) == ("gpt2", 100, 3e-4)
    assert parsed("gpt2").steps == 100  # another run knows nothing of it


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stepps = 7", "did you mean 'steps'"),
        ("steps = 'many'", "steps: 'many' is not a whole number"),
        ("no-split = 1", "must be true or false"),
        ("precision = 'int4'", "must be one of"),
        ("steps = [1, 2]", "not a whole number"),
        ("config = 'other.toml'", "not an option"),
        ("= 3", "not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "gpt-tiny", "--config", config(tmp_path, text)]) == 2
    err = capsys.readouterr().err
    assert says in err and len(err.splitlines()) == 1
