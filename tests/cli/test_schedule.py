"""``jaxscale schedule``."""

from tests.cli.conftest import loading


def test_a_schedule_is_drawn_in_text_and_in_a_picture(command, tmp_path):
    picture = tmp_path / "new" / "schedule.svg"
    code, out, err = command(
        *("schedule", "--stages", 2, "--microbatches", 4, "--chunks", 2),
        *("--num-layers", 6, "--svg", picture),
    )
    assert (code, err) == (0, loading("schedule"))
    assert "bubble 11.1%" in out
    assert "stage 0 holds layers 0-1, 4 stage 1 holds layers 2-3, 5" in out
    assert picture.read_text().startswith("<svg")


def test_what_does_not_fit_is_a_line(command):
    code, out, err = command(
        "schedule", "--stages", 4, "--microbatches", 6, "--chunks", 2
    )
    assert (code, out) == (2, "")
    assert "use microbatches=4 or 8, or chunks=1" in err
    code, _, err = command(
        "schedule", "--stages", 4, "--microbatches", 6, "--num-layers", 3
    )
    assert code == 2 and "use at most stages=3" in err
