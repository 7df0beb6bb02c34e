"""``python -m hgms_mix.follower``: another rank than 0 of a mix, in one of its stages."""

from __future__ import annotations

from hgms_mix.ranked import follow_started

if __name__ == "__main__":
    follow_started()
