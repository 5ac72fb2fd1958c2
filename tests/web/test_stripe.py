"""Stripe's own Python library, pointed at a local server of ours, retrying by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import stripe

from tests.web.dropper import Dropper
from tests.web.serving import Shop, new_key, serving


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with serving(tmp_path_factory.mktemp("stripe") / "shop", "uvicorn", workers=2) as running:
        running.all_answer(2)
        yield running


@pytest.fixture
def wire(bank: Shop) -> Iterator[Dropper]:
    with Dropper(bank.port) as dropper:
        yield dropper


@pytest.fixture
def client(wire: Dropper) -> Iterator[stripe.StripeClient]:
    http = stripe.RequestsClient()
    yield stripe.StripeClient(
        "sk_test_123",
        base_addresses={"api": f"http://127.0.0.1:{wire.port}"},
        max_network_retries=4,
        http_client=http,
    )
    http.close()


def charge(
    client: stripe.StripeClient, key: str, description: str, gate: str = ""
) -> stripe.Charge:
    params = {"amount": 4900, "currency": "eur", "source": "tok_visa", "description": description}
    if gate:
        params["metadata"] = {"gate": gate}
    return client.v1.charges.create(params, {"idempotency_key": key})


def test_dropped_answers_are_retried_into_one_charge(
    bank: Shop, wire: Dropper, client: stripe.StripeClient
) -> None:
    key = new_key()
    wire.drop_answers = 2
    first = charge(client, key, "order 1")
    again = charge(client, key, "order 1")
    assert (first.amount, first.id) == (4900, again.id)
    assert again.last_response.headers["idempotent-replayed"] == "true"
    assert wire.requests == 4
    assert len(bank.effects(key)) == 1


def test_a_connection_lost_in_the_middle_is_retried_into_the_same_charge(
    bank: Shop, wire: Dropper, client: stripe.StripeClient
) -> None:
    key = new_key()

    def charging() -> bool:
        if not bank.effects(key):
            return False
        bank.open_gate(key)
        return True

    wire.drop_when = charging
    made = charge(client, key, "order 2", gate=key)
    assert made.last_response.headers["idempotent-replayed"] == "true"
    assert wire.requests == 2
    assert len(bank.effects(key)) == 1


def test_an_unknown_outcome_is_told_and_not_retried(
    bank: Shop, wire: Dropper, client: stripe.StripeClient
) -> None:
    key = new_key()
    with pytest.raises(stripe.APIError) as told:
        charge(client, key, "lost")
    assert told.value.http_status == 409
    assert "outcome-unknown" in str(told.value.http_body)
    assert wire.requests == 2
    assert len(bank.effects(key)) == 1


def test_another_amount_under_the_same_key_is_refused(
    bank: Shop, wire: Dropper, client: stripe.StripeClient
) -> None:
    key = new_key()
    charge(client, key, "order 3")
    with pytest.raises(stripe.StripeError) as told:
        charge(client, key, "order 4")
    assert told.value.http_status == 422
    assert len(bank.effects(key)) == 1
