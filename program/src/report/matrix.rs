//! Tables that runs have logged, such as confusion matrices.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Deserialize;

use super::chart::short;
use super::escape::Escaped;
use super::run::Run;

/// Maximum number of rows or columns on the page.
const MAX_SIZE: usize = 100;

/// A table, as its event has it.
#[derive(Debug, Deserialize)]
pub(super) struct Table {
    step: u64,
    table: Cells,
}

#[derive(Debug, Deserialize)]
struct Cells {
    row_kind: String,
    column_kind: String,
    rows: Vec<String>,
    columns: Vec<String>,
    values: Vec<Vec<Option<f64>>>,
}

/// The last table of each name.
pub(super) fn tables(run: &Run) -> BTreeMap<String, Table> {
    let named = |event: &serde_json::Value| {
        let name = event["name"].as_str()?.to_owned();
        Some((name, Table::deserialize(event).ok()?))
    };
    run.events_of("table").filter_map(named).collect()
}

/// The table in HTML, with cells shaded by their share of the row.
pub(super) fn html(name: &str, label: &str, Table { step, table }: &Table) -> String {
    let mut html = format!(
        "<figure class=\"chart\"><figcaption>{}</figcaption><p class=\"reading\">{label}, after step {step}: \
         each row is a {}, each column a {}</p>",
        Escaped(name),
        Escaped(&table.row_kind),
        Escaped(&table.column_kind)
    );
    if table.rows.len().max(table.columns.len()) > MAX_SIZE {
        let _ = writeln!(
            html,
            "<p>{} rows and {} columns: too many to show; <code>events.jsonl</code> has them.</p></figure>",
            table.rows.len(),
            table.columns.len()
        );
        return html;
    }
    html += "<div class=\"wide\"><table class=\"matrix\"><tr><th></th>";
    for column in &table.columns {
        let _ = write!(html, "<th>{}</th>", Escaped(column));
    }
    html += "</tr>";
    for (name, row) in table.rows.iter().zip(&table.values) {
        let row: Vec<f64> = row.iter().map(|value| value.unwrap_or(f64::NAN)).collect();
        let sum: f64 = row.iter().sum();
        let _ = write!(html, "<tr><th>{}</th>", Escaped(name));
        for value in &row {
            let share = if sum > 0.0 { (value / sum).clamp(0.0, 1.0) } else { 0.0 };
            let _ = write!(
                html,
                "<td style=\"background:rgba(68,119,170,{:.2})\" title=\"{:.1} % of the row\">{}</td>",
                share * 0.7,
                share * 100.0,
                short(*value)
            );
        }
        html += "</tr>";
    }
    html += "</table></div></figure>\n";
    html
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_table_is_shaded_by_row() {
        let event = |step: u64, values: [[u64; 2]; 2]| {
            serde_json::json!({"event": "table", "step": step, "name": "m", "table": {
                "row_kind": "target", "column_kind": "prediction",
                "rows": ["<cat>", "dog"], "columns": ["<cat>", "dog"], "values": values
            }})
        };
        let events = vec![event(1, [[9, 9], [9, 9]]), event(5, [[3, 1], [0, 2]])];
        let run = Run { events, ..Run::default() };
        let html = html("m", "run", &tables(&run)["m"]);
        let texts: Vec<&str> =
            html.split("<td").skip(1).filter_map(|cell| cell.split(['>', '<']).nth(1)).collect();
        assert_eq!(texts, ["3", "1", "0", "2"]);
        assert!(html.contains("after step 5") && html.contains("rgba(68,119,170,0.52)"), "{html}");
        assert!(html.contains("<th>&lt;cat&gt;</th>"), "{html}");
    }
}
