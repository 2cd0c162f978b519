"""Secrets in URLs stay out of the record's command."""

from shoal.runs.record.provenance import format_masked_command, mask_command_line


def test_the_user_of_a_url_is_masked() -> None:
    words = ["shoal", "run", "train", "--pip", "git+https://oauth2:s3cret@example.org/team/lib.git", "args.at=a@b"]
    shown = format_masked_command(words)
    assert "s3cret" not in shown
    assert "git+https://***@example.org/team/lib.git" in shown
    assert "args.at=a@b" in shown
    assert mask_command_line("pip install https://t0ken@example.org/x") == "pip install 'https://***@example.org/x'"
    assert mask_command_line("curl https://example.org/a@b") == "curl https://example.org/a@b"
