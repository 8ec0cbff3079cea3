"""``jaxscale plan``."""


def test_layouts_are_ranked_and_the_best_is_a_command(command, tmp_path):
    page = tmp_path / "plan.html"
    code, out, err = command(
        *("plan", "--model", "llama3_8b", "--gpus", 16, "--batch-size", 64),
        *("--pipe", 2, "--rows", 1, "--top", 2, "--report", page),
    )
    assert (code, err) == (0, "")
    assert "llama3_8b on 16 H200" in out and "The first: pipe 2" in out
    assert "jaxscale train llama3_8b --mesh.fsdp" in out
    assert "does not have yet: a pipeline" in out
    assert "jaxscale schedule --stages 2" in out
    # With the pipe that was asked for nothing can run yet.
    assert "nothing that it can run today: today True leaves pipe 2 out" in out
    assert "<svg" in page.read_text()


def test_mistakes_are_a_line(command):
    code, out, err = command("plan", "--model", "lama3_8b", "--gpus", 8)
    assert (code, out) == (2, "") and "did you mean llama3_8b?" in err
    code, _, err = command("plan", "--model", "llama3_8b", "--gpus", 1)
    assert code == 2 and "GB are short" in err
    code, _, err = command("plan", "--model", "llama3_8b", "--gpus", 8, "--pipe", 3)
    assert code == 2 and "not divisible" in err
