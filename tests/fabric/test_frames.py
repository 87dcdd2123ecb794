"""What frames of losses say."""

from syncline.fabric.frames import on_word_of, read_loss


def test_a_loss_says_whose_word_it_is():
    assert read_loss(7, teller=3) == (7, 3)
    for accuser in (0, 5, 2**32 - 2):
        assert read_loss(on_word_of(accuser, 7), teller=3) == (7, accuser)
