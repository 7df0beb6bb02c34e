"""``python -m hgms_mix.stages.follower``: a rank other than 0 of a mix, in one of its stages."""

from __future__ import annotations

from hgms_mix.stages.on_ranks import follow_started

if __name__ == "__main__":
    follow_started()
