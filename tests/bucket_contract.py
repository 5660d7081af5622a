"""Conformance tests of a bucket on a server, for a subclass per service: what takes many objects, or large ones."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from statelog.storage import Store
from statelog.storage.open import check_put_if_absent
from statelog.testing.contracts import StoreContract


class BucketContract(StoreContract):
    """A subclass overrides the fixture ``store``."""

    many = 1200
    """More objects than one answer lists, or one request deletes."""

    def test_the_server_is_safe(self, store: Store) -> None:
        check_put_if_absent(store)
        assert store.list() == []

    def test_a_race_of_clients_to_create_has_one_winner(self, store: Store) -> None:
        stores = [pickle.loads(pickle.dumps(store)) for _ in range(16)]
        with ThreadPoolExecutor(len(stores)) as pool:
            for number in range(25):
                name = f"log/{number:020d}"
                tokens = [b"%d by %d" % (number, writer) for writer in range(len(stores))]
                won = list(pool.map(lambda store, token, name=name: store.put_if_absent(name, token), stores, tokens))
                assert won.count(True) == 1
                assert stores[0].read(name) == tokens[won.index(True)]

    def test_many_objects(self, store: Store) -> None:
        names = [f"changes/{number:05d}.run" for number in range(self.many)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(partial(store.put, data=b"1"), names))
        assert [info.name for info in store.list("changes/")] == names
        assert [info.name for info in store.list("changes/0011")] == names[110:120]
        store.delete([*names[:-10], "never/there"])
        assert [info.name for info in store.list()] == names[-10:]

    def test_a_large_object(self, store: Store) -> None:
        data = bytes(range(256)) * (32 << 12)
        store.put("large", data)
        assert store.size_bytes("large") == 32 << 20
        assert store.read("large", offset=(32 << 20) - 3) == data[-3:]
        assert store.read("large", offset=1 << 20, length=1 << 20) == data[1 << 20 : 2 << 20]
        assert store.read("large") == data
