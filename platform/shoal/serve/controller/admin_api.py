"""An endpoint's administration: deploy, canary, promote, roll back and delete, each answered once it is done.

Called by the shell around the controller, for calls that came in through any replica. Checks the change against the
present state, begins it with the controller and waits for its end. Raises InferenceError: 400 for an invalid change,
404 for an unknown model or version, 409 for a change that does not fit the state, 503 for one that did not end in time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from shoal.errors import InferenceError, RegistryError
from shoal.serve.controller.change_request import (
    ASKED,
    ChangeRequest,
    append_details,
    append_shares,
    list_options,
    parse_change,
    parse_options,
    require_from_version,
    require_guard_metric,
)
from shoal.serve.controller.config import LOAD_TIMEOUT_S
from shoal.serve.controller.controller import EndpointController
from shoal.serve.controller.live_control import LiveControl
from shoal.serve.controller.rollout import Goal, Phase
from shoal.serve.controller.state import Deployment, ModelState
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import LATEST


class RegisteredControl:
    """The changes of models that come from a registry: as `LiveControl` has them of those that follow a run, which need
    no agreement of the replicas."""

    def __init__(self, controller: EndpointController, registry: str, options: Callable[[str], ModelOptions]) -> None:
        self._controller = controller
        self._store = controller.store
        self._models = controller.state.models
        self._wait_until = controller.store.wait_until
        self._registry = registry
        self._options = options

    async def deploy(self, change: ChangeRequest, by: str, kind: str) -> None:
        """Serve the named version, or the present one under other options; a model that is new, too."""
        controller, name = self._controller, change.model
        model = self._models.get(name)
        before = model.deployment if model else Deployment(name, self._registry)
        base = before.options or self._options(name).model_dump(mode="json")
        selector = change.version_ref or before.version
        deployment = Deployment(name, before.registry, selector, parse_options(change.options, base))
        stable = model.rollout.stable if model else 0
        version = (stable if kind == "set" else 0) or self._resolve_version(deployment, selector)
        changes_options = stable > 0 and deployment.options != before.options
        is_change = stable != version or changes_options
        if model is None:
            controller.add_model(deployment)
        else:
            self._require_open(model)
            controller.redeploy(deployment, is_on_trial=is_change)
        if is_change:
            why = change.reason
            controller.begin_rollout(
                name, version, Goal.FLIP, kind=kind, by=by, why=why, changes_options=changes_options
            )
        try:
            await self._wait_until_stable(change, version, deployment.options)
        except InferenceError:
            now = self._models.get(name)
            if now is not None and model is None and not now.rollout.stable:
                controller.remove_model(name, by, "it could not be loaded")
            raise

    async def open_canary(self, change: ChangeRequest, by: str) -> None:
        """Stage a version as canary or shadow, or give the open candidate other shares; 0 ends a shadow."""
        name, model = change.model, self._models[change.model]
        version = self._select_version(change, model)
        if not version:
            raise InferenceError(400, f"{change.action} needs a version of {name!r}: name {name}@2 or {name}@candidate")
        rollout = model.rollout
        shares = change.shares_over(rollout.shares)
        if rollout.phase is Phase.CANARY and rollout.candidate == version:
            if change.ends_shadow and rollout.shares.is_shadow:
                await self.rollback(msgspec.structs.replace(change, version=""), by)
                return
            reason = append_shares(change.reason, shares)
            self._store.record_event(change.action, name, version, rollout.stable, by, reason)
            self._store.set_rollout(name, replace(rollout, kind=change.action, by=by, why=change.reason, shares=shares))
            return
        self._require_open(model)
        change.require_share()
        if rollout.phase is Phase.VACANT:
            raise InferenceError(409, f"model {name!r} has no stable version yet: deploy one")
        if rollout.stable == version:
            raise InferenceError(409, f"version {version} of {name!r} is the stable one already")
        self._controller.begin_rollout(
            name, version, Goal.CANARY, kind=change.action, by=by, why=change.reason, shares=shares
        )
        await self._wait_for_end(change, lambda: model.rollout.phase is Phase.CANARY, version)

    def _select_version(self, change: ChangeRequest, model: ModelState) -> int:
        """The named version, or the candidate; 0 for none. Raises InferenceError (404)."""
        ref = change.version_ref
        return self._resolve_version(model.deployment, ref) if ref else model.rollout.candidate

    async def promote(self, change: ChangeRequest, by: str) -> None:
        """Make the candidate the stable version, or a named version where there is none."""
        name, model = change.model, self._models[change.model]
        rollout, version = model.rollout, self._select_version(change, model)
        if rollout.phase is not Phase.CANARY:
            if not change.version_ref:
                raise InferenceError(409, f"model {name!r} has no open candidate: name a version")
            self._require_open(model)
            alias = "" if model.deployment.alias == LATEST else model.deployment.alias
            if version != rollout.stable or (alias and self._resolve_version(model.deployment, alias) != version):
                self._controller.begin_rollout(name, version, Goal.FLIP, kind="promote", by=by, why=change.reason)
        elif version != rollout.candidate:
            raise InferenceError(409, f"the candidate of {name!r} is version {rollout.candidate}: roll it back")
        else:
            await self._wait_until_staged(change, model)
            promoted = replace(model.rollout, kind="promote", by=by, why=change.reason)
            self._store.set_rollout(name, promoted)
            self._controller.flip(name)
        await self._wait_until_stable(change, version)

    async def _wait_until_staged(self, change: ChangeRequest, model: ModelState) -> None:
        """Wait for replicas that joined after the candidate was opened and still stage it."""
        candidate = model.rollout.candidate
        attempt = model.rollout.attempt

        def over() -> bool:
            is_open = self._models.get(change.model) is model and model.rollout.phase is Phase.CANARY
            return not is_open or self._controller.has_candidate(change.model)

        if not await self._wait_until(over, change.timeout_s):
            raise InferenceError(503, f"not every replica had staged version {candidate} after {change.timeout_s:g} s")
        if self._models.get(change.model) is not model:
            raise InferenceError(409, f"model {change.model!r} was deleted meanwhile")
        if model.rollout.phase is not Phase.CANARY or model.rollout.attempt != attempt:
            raise InferenceError(409, f"version {candidate} of {change.model!r} is no candidate any more")

    async def rollback(self, change: ChangeRequest, by: str) -> None:
        """Drop the candidate; without one, return to the version before."""
        name, model = change.model, self._models[change.model]
        rollout, reason = model.rollout, change.reason or ASKED
        if change.version_ref:
            ref = f"{name}@{change.version_ref}"
            problem = f"a registered model is rolled back to what was stable before: promote {ref} instead"
            raise InferenceError(409, problem)
        require_from_version(change, rollout.candidate or rollout.stable)
        if rollout.phase is Phase.CANARY:
            self._controller.drop_candidate(name, by, reason)
            self._controller.tick()  # begin the alias's present version, and wait for it
            await self._wait_until(lambda: self._is_idle(name), change.timeout_s)
            return
        if rollout.phase is Phase.STAGING:
            self._controller.drop_candidate(name, by, reason)
            return
        self._require_open(model)
        try:
            version = rollout.previous
            if (alias := model.deployment.alias) not in ("", LATEST):
                catalogue = self._controller.catalogue(model.deployment.registry)
                version = catalogue.find_previous(name, alias, rollout.withdrawn)
        except RegistryError as error:
            raise InferenceError(409, str(error)) from None
        if not version:
            problem = "has no version to go back to: what was before was withdrawn, or nothing was"
            raise InferenceError(409, f"model {name!r} {problem}. Deploy one by its number")
        self._controller.begin_rollout(name, version, Goal.FLIP, kind="rollback", by=by, why=reason)
        await self._wait_until_stable(change, version)

    def record_metric(self, change: ChangeRequest) -> None:
        """Give the guard a user's metric of the candidate."""
        model = self._models[change.model]
        if model.rollout.phase is not Phase.CANARY:
            raise InferenceError(409, f"model {change.model!r} has no open candidate to measure")
        if change.version_ref and change.version_ref != str(model.rollout.candidate):
            raise InferenceError(409, f"the candidate of {change.model!r} is version {model.rollout.candidate}")
        require_guard_metric(change, model.deployment.options)
        assert change.value is not None
        model.metrics[change.metric] = change.value
        self._controller.tick()

    async def _wait_until_stable(
        self, change: ChangeRequest, version: int, options: Mapping[str, Any] | None = None
    ) -> None:
        def is_done() -> bool:
            model = self._models.get(change.model)
            if model is None or not model.rollout.is_open or model.rollout.stable != version:
                return False
            return options is None or model.deployment.options == options

        await self._wait_for_end(change, is_done, version)
        assignments = self._controller.assignments
        try:
            await assignments.load(change.model, change.timeout_s)  # it may have replaced one without being staged
        except InferenceError:
            if not (reason := assignments.find_error(change.model)):
                raise
            remedy = "roll it back, or deploy another version"
            problem = f"version {version} of {change.model!r} answers nothing: {reason}"
            raise InferenceError(409, f"{problem}: {remedy}") from None

    async def _wait_for_end(self, change: ChangeRequest, succeeded: Callable[[], bool], version: int) -> None:
        """Wait for the end of a rollout. Raises InferenceError: 409 with the reason of a failure, 503 after the
        timeout."""
        name = change.model
        if not await self._wait_until(lambda: succeeded() or self._is_idle(name), change.timeout_s):
            problem = f"version {version} of {name!r} was not ready after {change.timeout_s:g} s: see status"
            raise InferenceError(503, problem)
        if name not in self._models:  # by another, or by a tick, since it could not be loaded
            events = [each for each in self._controller.state.events if (each.kind, each.model) == ("delete", name)]
            raise InferenceError(409, f"model {name!r} was deleted meanwhile: {events[-1].reason if events else ''}")
        if not succeeded():
            raise InferenceError(
                409, f"version {version} of {name!r} was not taken: {self._models[name].rollout.reason}"
            )

    def _is_idle(self, name: str) -> bool:
        return name not in self._models or self._models[name].rollout.is_open

    def _require_open(self, model: ModelState) -> None:
        rollout = model.rollout
        if not rollout.is_open:
            what = f"version {rollout.candidate} of {model.deployment.name!r} is in the phase {rollout.phase}"
            raise InferenceError(409, f"{what}: promote it or roll it back first")

    def _resolve_version(self, deployment: Deployment, selector: str) -> int:
        try:
            return self._controller.catalogue(deployment.registry).resolve(deployment.name, selector)
        except RegistryError as error:
            raise InferenceError(404, str(error)) from None


class AdminApi:
    """The administration of one endpoint.

    registry: folder of the registry that new models come from
    options:  how a new model is served, by its name
    """

    def __init__(self, controller: EndpointController, registry: str, options: Callable[[str], ModelOptions]) -> None:
        self._controller, self._store = controller, controller.store
        self._registered = RegisteredControl(controller, registry, options)

    def _find_control(self, name: str) -> RegisteredControl | LiveControl:
        """What changes this model; a model that is not served yet comes from a registry."""
        model = self._store.state.models.get(name)
        return self._controller.live if model is not None and model.deployment.is_live else self._registered

    async def administer(self, values: Mapping[str, Any], by: str) -> str:
        """Make a change, and return the model's name when every replica has followed. Raises InferenceError."""
        change = parse_change(values)
        control = self._find_control(change.model)
        if change.action != "deploy":
            self._store.get_model(change.model)
        match change.action:
            case "deploy":
                await control.deploy(change, by, "deploy")
            case "set":
                reason = append_details(change.reason, ", ".join(list_options(change.options)))
                await control.deploy(msgspec.structs.replace(change, reason=reason), by, "set")
            case "canary" | "shadow":
                await control.open_canary(change, by)
            case "promote":
                await control.promote(change, by)
            case "rollback":
                await control.rollback(change, by)
            case "delete":
                await self._delete(change, by)
            case "metric":
                control.record_metric(change)
        await self._store.wait_until(self._store.is_applied_everywhere, change.timeout_s)
        return change.model

    async def load(self, name: str, parameters: Mapping[str, Any], by: str) -> None:
        """The protocol's load: parameters `version` (a number or an alias) and `config` (JSON of ModelOptions)."""
        unknown = parameters.keys() - {"version", "config"}
        if unknown:
            raise InferenceError(400, f"parameter {min(unknown)!r} is unknown: expected version, config")
        options: dict[str, Any] = {}
        if "config" in parameters:
            try:
                options = json.loads(parameters["config"])
            except (TypeError, ValueError) as error:
                raise InferenceError(400, f"parameter 'config' is not JSON: {error}") from None
            if not isinstance(options, dict):
                raise InferenceError(400, "parameter 'config' is not a JSON object of options")
        version = str(parameters.get("version", ""))
        values = {"action": "deploy", "model": name, "version": version, "options": options, "reason": "loaded"}
        change = parse_change({**values, "timeout_s": LOAD_TIMEOUT_S})
        await self._find_control(change.model).deploy(change, by, "load")

    async def unload(self, name: str, by: str) -> None:
        await self._delete(parse_change({"action": "delete", "model": name, "reason": "unloaded"}), by)

    async def _delete(self, change: ChangeRequest, by: str) -> None:
        self._store.get_model(change.model)
        self._controller.remove_model(change.model, by, change.reason)
        reports = self._controller.reports

        def gone() -> bool:
            return all(change.model not in report.models for report in reports.values())

        if not await self._store.wait_until(gone, change.timeout_s):
            raise InferenceError(503, f"model {change.model!r} is still answering what it has; it will then be gone")
