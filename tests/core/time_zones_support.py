"""What the tests of :mod:`tests.core.test_time_zones` and others share."""

from __future__ import annotations

OFFSETS_S = {
    **dict.fromkeys(["Z", "UT", "+0", "-0", "+00:00", "UTC+0", "GMT-00:00", "UTC+00:00:00", "UT-0"], 0),
    **dict.fromkeys(["+2", "+02", "+2:0", "+02:0", "+2:00", "+0200", "+02:00", "+02:00:00", "+020000"], 7200),
    **dict.fromkeys(["UTC+2", "UTC+02", "UTC+2:00", "UTC+02:0", "UTC+0200", "GMT+2", "GMT+02:00", "UT+2"], 7200),
    **dict.fromkeys(["-2:30", "-02:30", "-0230", "UTC-2:30", "GMT-0230", "UT-02:30:00"], -9000),
    **dict.fromkeys(["+5:3", "+05:3", "GMT+5:3"], 18180),
    **dict.fromkeys(["+02:00:10", "+020010", "UTC+020010"], 7210),
    **dict.fromkeys(["+18", "+18:00", "UTC+180000"], 64800),
    "-18:00": -64800,
    "-0:30": -1800,
}
"""What Java makes of them."""


UNKNOWN = [
    *("", " ", "+", "-", "+a", "2", "02:00", "GMT+", "UTC+", "UTC+:00", "+2:", "+001:00", "+01:60", "+00:00:60"),
    *("+18:01", "+19", "UTC+19", "-18:00:01", "z", "ut", "gmt+2", "Utc+2", "UTC +2", "UTC ", " UTC", "+02:00 "),
    *("+5:3:00", "+05:30:1", "Z0", "pst", "Moon/Base", "/etc/localtime", "../UTC", "日本", "+٠٢"),
]


SHORT = {"PST": "America/Los_Angeles", "CST": "America/Chicago", "IST": "Asia/Kolkata", "ECT": "Europe/Paris"}
