"""Two processes with other settings name what differs, and end."""

from tests.training import processes


def test_what_differs_is_named_by_both(tmp_path):
    (first, _), (second, _) = processes.run_two(
        "tests.training.disagreeing_worker", str(tmp_path)
    )
    assert first == second and len(first) == 6
    for told, expected in zip(
        first,
        (
            "steps is 40 on process 0 and 41 on process 1; start",
            "microbatches is 1 on process 0 and 2 on process 1; start",
            "data.batch_size is 8 on process 0 and 16 on process 1; data.seq_len is 8 ",
            "model.num_layers is ",
            "optimizer.learning_rate is 0.01 on process 0 and 0.5 on process 1; start",
            "output_dir is ",
        ),
        strict=True,
    ):
        assert told.startswith(expected)
    assert list(tmp_path.iterdir()) == []
