//! Tables of numbers and names.

use std::fs;
use std::path::Path;

use candle_core::Device;
use fulgurite_core::Result;
use fulgurite_core::data::{DataContext, DataModule as _, Split};
use fulgurite_data::{Table, TableBatch, Task};
use fulgurite_test_message::assert_says;
use tempfile::TempDir;

fn folder(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(dir.path().join(name), content).unwrap();
    }
    dir
}

/// Opens the folder's table with these keys, in which DIR stands for the folder.
fn setup(dir: &Path, keys: &str) -> Result<Table> {
    let fraction = if keys.contains("validation_") { "" } else { "validation_fraction = 0.0\n" };
    let path = if keys.contains("path = ") && !keys.contains("_path = ") {
        String::new()
    } else {
        format!("path = {:?}\n", dir.join("data.csv"))
    };
    let keys = keys.replace("DIR", dir.to_str().unwrap());
    let config = toml::from_str(&format!("{path}{fraction}{keys}")).unwrap();
    Table::setup(&config, &DataContext::default())
}

fn error(dir: &Path, keys: &str) -> String {
    setup(dir, keys).unwrap_err().to_string().replace(dir.to_str().unwrap(), "DIR")
}

fn all(data: &Table, split: Split) -> TableBatch {
    data.batch(split, &(0..data.len(split)).collect::<Vec<_>>(), &Device::Cpu).unwrap()
}

fn features(batch: &TableBatch) -> Vec<Vec<f32>> {
    batch.features.to_vec2().unwrap()
}

const HOUSES: &str = "rooms,city,zip,price\n1,Rome,10,90.5\n3,Oslo,9,300\n5,Rome,10,120\n";

#[test]
fn training_rows_define_columns() {
    let held_out = "price,city,rooms,zip\n7,Bern,7,9\n";
    let dir = folder(&[("data.csv", HOUSES), ("held.csv", held_out)]);
    let keys = "features = ['rooms', 'city', 'zip']\ncategories = ['zip']\ntarget = 'price'\n\
                validation_path = 'DIR/held.csv'";
    let data = setup(dir.path(), keys).unwrap();
    let names = ["rooms", "city=Oslo", "city=Rome", "zip=9", "zip=10"];
    assert_eq!((data.feature_names(), data.num_features()), (names.map(str::to_owned).to_vec(), 5));
    assert_eq!((data.task(), data.class_names()), (Some(Task::Regression), None));
    let train = all(&data, Split::Train);
    let std = (8f64 / 3.0).sqrt();
    let low = (-2.0 / std) as f32;
    let expected = [[low, 0., 1., 0., 1.], [0., 1., 0., 1., 0.], [-low, 0., 1., 0., 1.]];
    assert_eq!(features(&train), expected.map(|row| row.to_vec()));
    assert_eq!(train.targets.unwrap().to_vec1::<f32>().unwrap(), [90.5, 300., 120.]);
    // The town is unknown, and the mean and deviation are those of the training rows.
    let held_out = all(&data, Split::Validation);
    assert_eq!(features(&held_out), [vec![(4.0 / std) as f32, 0., 0., 1., 0.]]);
    let report = data.report().unwrap();
    let what = "evaluated rows with a name that no training row has";
    assert!(
        report.sources[0].counts.iter().any(|(name, count)| (name.as_str(), *count) == (what, 1))
    );
    assert_eq!(
        data.sample_name(Split::Test, 0).unwrap(),
        format!("{}, line 2", dir.path().join("held.csv").display())
    );
}

#[test]
fn values_are_classes_or_numbers() {
    let dir = folder(&[
        ("data.csv", "x,stars,kind\n1,10,b\n2,9,a\n3,10,b\n"),
        ("rows.jsonl", "{\"x\": true, \"y\": 1.0}\n{\"x\": false, \"y\": 2}\n"),
    ]);
    let classes = |keys: &str| {
        let data = setup(dir.path(), &format!("features = ['x']\n{keys}")).unwrap();
        let targets = all(&data, Split::Train).targets.unwrap();
        (data.class_names().unwrap().join(" "), targets.to_vec1::<i64>().unwrap())
    };
    assert_eq!(classes("target = 'kind'"), ("a b".to_owned(), vec![1, 0, 1]));
    let stars = classes("target = 'stars'\ntask = 'classification'");
    assert_eq!(stars, ("9 10".to_owned(), vec![1, 0, 1]));
    let data =
        setup(dir.path(), "features = ['x']\ntarget = 'stars'\ntask = 'regression'").unwrap();
    assert_eq!(data.task(), Some(Task::Regression));
    let keys = "path = 'DIR/rows.jsonl'\nfeatures = ['x']\ntarget = 'y'\nstandardize = false";
    let batch = all(&setup(dir.path(), keys).unwrap(), Split::Train);
    assert_eq!(features(&batch), [[1.], [0.]]);
    assert_eq!(batch.targets.unwrap().to_vec1::<f32>().unwrap(), [1., 2.]);
    let keys = "path = 'DIR/rows.jsonl'\nfeatures = ['y']\ntarget = 'x'";
    assert_eq!(setup(dir.path(), keys).unwrap().class_names().unwrap(), ["false", "true"]);
    let data = setup(dir.path(), "features = ['x']").unwrap();
    assert!(data.task().is_none() && all(&data, Split::Train).targets.is_none());
}

#[test]
fn missing_values_are_errors_or_means() {
    let dir = folder(&[
        ("data.csv", "x,city,y\n1,Rome,0.5\n,Oslo,1.5\n3,,2.5\n"),
        ("new.csv", "city,x\n,2\n"),
    ]);
    let keys = "features = ['x', 'city']\ntarget = 'y'\npredict_path = 'DIR/new.csv'\n";
    assert_says!(error(dir.path(), keys), r#"data: DIR/data.csv, line 3 has no value under "x" …"#);
    let data = setup(dir.path(), &format!("{keys}missing = 'mean'")).unwrap();
    let expected = [[-1., 0., 1.], [0., 1., 0.], [1., 0., 0.]];
    assert_eq!(features(&all(&data, Split::Train)), expected.map(|row| row.to_vec()));
    let predicted = all(&data, Split::Predict);
    assert_eq!((features(&predicted), predicted.targets.is_none()), (vec![vec![0., 0., 0.]], true));
}

#[test]
fn mistakes_are_explained() {
    let dir = folder(&[
        ("data.csv", HOUSES),
        ("empty.csv", "x,y\n,1.5\n,2.5\n"),
        ("held.csv", "rooms,price\nmany,1.5\n"),
        ("mixed.csv", "x,y\n1.5,a\nNA,b\n"),
        ("other.csv", "rooms,price\n2,1.5\n"),
        ("list.jsonl", "{\"x\": [1], \"y\": 0.5}\n"),
    ]);
    let error = |keys: &str| error(dir.path(), keys);
    assert_says!(error("target = 'price'"), "data.features is missing: name the columns …");
    assert_says!(
        error("features = ['rooms', 'price']\ntarget = 'price'"),
        r#"data.target names the column "price" a second time"#
    );
    assert_says!(
        error("path = 'DIR/mixed.csv'\nfeatures = ['x']"),
        r#"data: DIR/mixed.csv, line 3 has "NA" under "x" … have numbers … data.categories"#
    );
    assert_says!(
        error("path = 'DIR/mixed.csv'\nfeatures = ['y']\ntarget = 'x'"),
        r#"data: DIR/mixed.csv, line 3 has "NA" … (data.target) … have numbers … data.task"#
    );
    assert_says!(
        error("features = ['rooms', 'size']\ntarget = 'price'"),
        r#"data: DIR/data.csv (data.path) has no column "size" (data.features) …"#
    );
    assert_says!(
        error("features = ['rooms']\ncategories = ['zip']"),
        r#"data.categories names "zip", which data.features does not"#
    );
    assert_says!(
        error("features = ['rooms']\ntask = 'regression'"),
        "data.task is for a table with a data.target …"
    );
    assert_says!(
        error("features = ['rooms']\ntarget = 'zip'"),
        r#""zip" (data.target) has integers … data.task to "classification" …"#
    );
    assert_says!(
        error("features = ['rooms']\ntarget = 'city'\ntask = 'regression'"),
        r#"data: DIR/data.csv, line 2 has "Rome" under "city" (data.target) … no number"#
    );
    assert_says!(
        error("features = ['rooms']\ntarget = 'price'\nvalidation_path = 'DIR/held.csv'"),
        r#"data: DIR/held.csv, line 2 has "many" under "rooms" … training rows have numbers"#
    );
    assert_says!(
        error(
            "features = ['rooms']\ntarget = 'price'\ntask = 'classification'\ntest_path = 'DIR/other.csv'"
        ),
        r#"data: DIR/other.csv, line 2 has "1.5" under "price" (data.target) … none of …"#
    );
    assert_says!(
        error("path = 'DIR/empty.csv'\nfeatures = ['x']\ntarget = 'y'"),
        r#"data: no training row … under "x" (data.features)"#
    );
    assert_says!(
        error("path = 'DIR/list.jsonl'\nfeatures = ['x']\ntarget = 'y'"),
        r#"data: DIR/list.jsonl, line 1 has [1] under "x" (data.features) … neither …"#
    );
}
