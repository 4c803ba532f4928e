"""Whose a salt is, and what a selection holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.hashing import Namespace
from kvd.cache.tenants import Selection, is_of_tenant, pin_label, pin_tenant, tenant_salt
from kvd.types import pack_tokens

TENANTS = st.text(max_size=8)
SALTS = st.binary(max_size=64)


def test_without_tenant_and_salt_everybody_shares():
    assert tenant_salt("", b"") == b""
    assert is_of_tenant(b"", "")
    assert not is_of_tenant(b"", "acme")


def test_no_split_of_tenant_and_salt_gives_anothers_salt():
    pairs = [("a", b"b"), ("ab", b""), ("", b"ab"), ("b", b"a"), ("a", b""), ("", b"a")]
    assert len({tenant_salt(*pair) for pair in pairs}) == len(pairs)
    assert len({Namespace(b"f", tenant_salt(*pair)).root for pair in pairs}) == len(pairs)


def test_the_salt_is_what_the_disk_knows_for_good():
    assert tenant_salt("acme", b"s").hex() == (
        "85793c657186cac2444fef90edacaf0253e17ebecd3bb16cb8b9690fce356f31ef08e1131682bc0e3f75942dcc6b3723"
    )


@given(first=st.tuples(TENANTS, SALTS), second=st.tuples(TENANTS, SALTS))
def test_salts_are_equal_only_for_equal_tenant_and_salt_and_belong_to_their_tenant_alone(first, second):
    assert (tenant_salt(*first) == tenant_salt(*second)) == (first == second)
    assert is_of_tenant(tenant_salt(*first), first[0])
    assert is_of_tenant(tenant_salt(*first), second[0]) == (first[0] == second[0])


def test_a_selection_of_a_tenant_a_salt_and_a_prefix():
    one, other = tenant_salt("a", b"one"), tenant_salt("a", b"other")
    tokens = pack_tokens(range(8))
    whole = Selection("a")
    assert whole.holds(one, tokens)
    assert whole.holds(other, b"")
    assert not whole.holds(tenant_salt("b", b"one"), tokens)
    assert not whole.holds(b"", tokens)
    salted = Selection("a", one)
    assert salted.holds(one, tokens)
    assert not salted.holds(other, tokens)
    prefix = Selection("a", one, tokens)
    assert prefix.holds(one, tokens + pack_tokens([9]))
    assert not prefix.holds(one, tokens[:-4])
    assert prefix.may_hold(one, tokens[:-4])
    assert not prefix.may_hold(one, pack_tokens([1]))
    assert not prefix.holds(other, tokens)
    assert Selection("", b"").has_salt(b"")
    assert Selection("").has_salt(tenant_salt("", b"x"))


def test_names_of_pins_carry_their_tenant():
    assert (pin_tenant("uid:7/a"), pin_label("uid:7/a")) == ("uid:7", "a")
    assert (pin_tenant("a"), pin_label("a")) == ("", "a")
