"""Creates the demo's certificate authority once, and certificates that are missing, near their end or outdated.

`--renew` issues all of them again. Running processes reload them. `--revoke NUMBER` adds a certificate to the list of
revoked certificates, which all cores and fronts read. Here, a region's front and learners share a volume. In
production, give each process only its own certificate. The authority's key is readable only by this script's user,
which runs no other process.
"""

import argparse
from pathlib import Path

from atoll_server.access import tokens
from atoll_server.access.certificate_authority import AUTHORITY_KEY, init, issue
from atoll_wire.security.certificate import Role, read_certificate
from atoll_wire.security.transport import AUTHORITY, CERTIFICATE, KEY

DAYS, LEAST_DAYS = 365.0, 30.0  # validity, and how much of it must remain
REGIONS = ("eu", "us", "ap", "near")
CORE = ["core", "localhost", "127.0.0.1", "relay-eu", "relay-us", "relay-ap", "shard-0", "shard-1", "shard-2"]
WANTED: list[tuple[str, Role, str, list[str]]] = [
    ("home", Role.CORE, "home", CORE),
    ("operator", Role.OPERATOR, "demo", []),
    ("viewer", Role.VIEWER, "core", []),
    ("dashboard", Role.VIEWER, "dashboard", []),
    *((f"{region}/front", Role.FRONT, region, [f"front-{region}"]) for region in REGIONS),
    *((f"{region}/learner", Role.LEARNER, f"{region}.*", []) for region in REGIONS),
]
WITH_REVOKED = ("home", *(f"{region}/front" for region in REGIONS))


def make(root: Path, *, renew: bool = False, revoke: str = "") -> None:
    """Makes all files below `root`, whose folders are the volumes of the services.

    renew: whether to issue valid certificates again. revoke: serial number or fingerprint of a certificate to revoke.
    """
    authority = root / "authority"
    if not (authority / AUTHORITY_KEY).exists():
        init(authority)
    for folder, role, name, hosts in WANTED:
        to = root / folder
        if renew or not valid(to, authority, f"{role.value}/{name}", hosts):
            made = issue(authority, role, name, hosts, DAYS)
            for file in (AUTHORITY, KEY, CERTIFICATE):
                hand_over((made / file).read_text(), to / file)
            print(f"issued {role.value}/{name}")
    if not (root / "operator/token").exists():
        hand_over(tokens.new(authority / "tokens", "demo") + "\n", root / "operator/token")
    hand_over((authority / "tokens").read_text(), root / "viewer/tokens")  # their hashes, which the core needs
    revoked = authority / "revoked"  # cores and fronts read their copies again after each change
    if not revoked.exists():
        revoked.touch()
    if revoke:
        revoked.write_text(f"{revoked.read_text()}{revoke}\n")
        print(f"revoked {revoke}")
    for folder in WITH_REVOKED:
        hand_over(revoked.read_text(), root / folder / "revoked")


def valid(folder: Path, authority: Path, identity: str, hosts: list[str]) -> bool:
    """Returns whether a folder has a certificate of this authority for this owner, which is not near its end."""
    if not all((folder / file).exists() for file in (AUTHORITY, KEY, CERTIFICATE)):
        return False
    found = read_certificate(folder)
    trusted = (folder / AUTHORITY).read_bytes() == (authority / AUTHORITY).read_bytes()
    return trusted and found.identity == identity and set(found.hosts) == set(hosts) and found.days_left > LEAST_DAYS


def hand_over(text: str, to: Path) -> None:
    """Writes a file that the services' group may read, unless it has this content."""
    if to.exists() and to.read_text() == text:
        return
    to.parent.mkdir(exist_ok=True)
    part = to.with_name(f"{to.name}.part")
    part.touch(mode=0o640)
    part.write_text(text)
    part.replace(to)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Issues and revokes the demo's certificates.")
    parser.add_argument("--renew", action="store_true", help="issue all certificates again")
    parser.add_argument("--revoke", default="", metavar="NUMBER", help="serial number or SHA-256 fingerprint")
    asked = parser.parse_args()
    make(Path("/certs"), renew=asked.renew, revoke=asked.revoke)
