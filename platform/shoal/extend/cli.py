"""The command line, for libraries: commands and displays."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.cli.commands.cluster import describe_status
    from shoal.cli.commands.run_session import RunArguments, launch_run
    from shoal.cli.commands.serve_deploy import list_jobs_by_endpoint
    from shoal.cli.display.first_request import begin_curl, can_be_picture, make_request
    from shoal.cli.display.panels import RunView, extend_history, find_phase, render_cells, render_fact, render_table
    from shoal.cli.support.console import (
        CommandGroup,
        make_literal_console,
        make_number_column,
        make_table,
        prepare_output_folder,
        print_json,
        strip_task_key,
        to_json_value,
        write_files,
    )
    from shoal.cli.support.endpoint_logs import EndpointLogs
    from shoal.cli.support.jobs import (
        JobLogReader,
        describe_failure,
        find_job,
        ignore_further_interrupts,
        interrupt_on_termination,
        job_environment,
        validate_overrides,
    )
    from shoal.cli.support.options import (
        SECONDS,
        FiniteRange,
        address_option,
        ca_option,
        endpoint_option,
        json_option,
        key_option,
        output_folder_option,
        overrides_argument,
        plain_option,
    )

__getattr__ = load_on_demand(__name__)
