"""What is counted, in words."""

from hbmtwin.workloads.plural import counted, were


def test_one_is_one_and_all_others_are_several() -> None:
    assert [counted(n, "client") for n in (0, 1, 2, 1234)] == ["0 clients", "1 client", "2 clients", "1,234 clients"]
    assert (were(0), were(1), were(2)) == ("were", "was", "were")
